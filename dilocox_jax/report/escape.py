"""Escapes texts, so that pages, pictures and terminals show them as they are.

For example, users choose the names of runs. A name may have characters with a
meaning in Markdown, in matplotlib or on a terminal.
"""

import functools
import re
from collections.abc import Iterator

from matplotlib.font_manager import FontProperties, findfont, get_font
from rich.text import Text

from dilocox_jax.checks import printable

# Characters with a meaning in Markdown. A "_" inside a word, as in
# "overlap_loco", has none.
_SPECIAL = re.compile(r"([\\`*\[\]~$|]|(?<![^\W_])_|_(?![^\W_]))")
_LONGEST = 80  # Largest number of characters of a name in a picture.
_NO_GLYPH = "\u25a1"  # A square, in place of a character the font lacks.


class Markdown(str):
  """A text that is Markdown already, so `markdown` leaves it unchanged."""


def markdown(text: str) -> Markdown:
  """Returns Markdown that shows a text as it is, on one line.

  Characters that cannot be printed become escapes (`checks.printable`). A text
  that is `Markdown` already is returned unchanged.
  """
  if isinstance(text, Markdown):
    return text
  text = printable(text).replace("&", "&amp;").replace("<", "&lt;")
  return Markdown(_SPECIAL.sub(r"\\\1", text))


def code(text: str) -> Markdown:
  """Returns Markdown that shows a text as code, on one line.

  A text with a "`" or a "|" is shown as plain text instead.
  """
  text = printable(text)
  if re.search("[`|]", text):
    return markdown(text)
  return Markdown(f"`{text}`")


def indented(text: str) -> Iterator[str]:
  """Yields the lines of a text, indented as a Markdown code block."""
  for line in text.splitlines():
    yield f"    {printable(line)}"


def fenced(text: str) -> list[str]:
  """Returns the lines of a Markdown code block between fences of backticks.

  The fences are longer than any row of backticks in the text, so the text
  cannot end the block.
  """
  longest_run = max(map(len, re.findall("`+", text)), default=0)
  fence = "`" * max(3, longest_run + 1)
  return [fence, *map(printable, text.splitlines()), fence]


def terminal(text: str) -> Text:
  """Returns a text for a terminal: markup and control codes do nothing."""
  return Text(printable(text))


def picture(name: str, longest: int = _LONGEST) -> str:
  """Returns a name to write into a picture, on one line and not too long.

  A square replaces characters that the font lacks. A leading "_" gets a blank
  in front, because matplotlib leaves names that begin with "_" out of legends.

  Args:
    name: The name.
    longest: Largest number of characters, at least 20. A longer name loses its
      middle.
  """
  name = printable(name)
  if len(name) > longest:
    name = f"{name[: longest - 20]}\u2026{name[-19:]}"
  characters = [
    character if _has_glyph(character) else _NO_GLYPH for character in name
  ]
  text = "".join(characters)
  if text.startswith("_"):
    return f" {text}"
  return text


@functools.cache
def _has_glyph(character: str) -> bool:
  """Whether the font of pictures has a character."""
  font = get_font(findfont(FontProperties()))
  return font.get_char_index(ord(character)) != 0


def file_name(text: str) -> str:
  """Returns a name of a file: "a b/c" becomes "a_b_c".

  Words of ASCII letters and digits are joined by "_". The name has at most 80
  characters, and may be "".
  """
  return re.sub(r"[^A-Za-z0-9]+", "_", text)[:80].strip("_")
