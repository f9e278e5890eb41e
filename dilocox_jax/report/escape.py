"""Shows names as they are: on a page, in a picture and on a terminal.

Names come from others: those of directories, methods, texts, clusters and
replicas, and values of a config. A name may have characters that mean something
to Markdown, to the picture library or to a terminal. Each medium has one
function here, through which every name goes.
"""

import functools
import re
from collections.abc import Iterator

from matplotlib.font_manager import FontProperties, findfont, get_font
from rich.text import Text

from dilocox_jax.checks import printable

# What Markdown reads: but for a "_" inside a word, as in "overlap_loco".
_SPECIAL = re.compile(r"([\\`*\[\]~$|]|(?<![^\W_])_|_(?![^\W_]))")
_LONGEST = 80  # Characters of a name in a picture.
_NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
_NO_GLYPH = "\u25a1"  # A square, in place of what the font does not have.


class Markdown(str):
  """A text in which Markdown is meant; any other text is only shown."""


def markdown(text: str) -> Markdown:
  """Returns a text, on one line, as Markdown that shows it as it is.

  Args:
    text: The text; if it is `Markdown` already, it is returned.
  """
  if isinstance(text, Markdown):
    return text
  text = printable(text).replace("&", "&amp;").replace("<", "&lt;")
  return Markdown(_SPECIAL.sub(r"\\\1", text))


def code(text: str) -> Markdown:
  """Returns a text, on one line, as code of Markdown.

  What would end the code, or a table's cell, is shown as plain text instead.
  """
  text = printable(text)
  return markdown(text) if re.search("[`|]", text) else Markdown(f"`{text}`")


def indented(text: str) -> Iterator[str]:
  """Yields the lines of a text as a block of code of Markdown."""
  for line in text.splitlines():
    yield f"    {printable(line)}"


def fenced(text: str) -> list[str]:
  """Returns the lines of a text between fences, which it cannot close."""
  longest = max(map(len, re.findall("`+", text)), default=0)
  fence = "`" * max(3, longest + 1)
  return [fence, *map(printable, text.splitlines()), fence]


def terminal(text: str) -> Text:
  """Returns a text for a terminal: no markup, no control characters.

  A no-break space is only a blank, so it stays.
  """
  pieces = text.split(_NO_BREAK_SPACE)
  return Text(_NO_BREAK_SPACE.join(map(printable, pieces)))


def picture(name: str, longest: int = _LONGEST) -> str:
  """Returns a name for a picture: one line, not too long, in known letters.

  A name that begins with "_" has a blank in front: the picture library leaves
  such names out of a legend.

  Args:
    name: The name.
    longest: Characters that it may have. The middle of a longer one is left
      out, since names often differ at their ends.
  """
  name = printable(name)
  if len(name) > longest:
    name = f"{name[: longest - 20]}\u2026{name[-19:]}"
  shown = "".join(each if _has_glyph(each) else _NO_GLYPH for each in name)
  return f" {shown}" if shown.startswith("_") else shown


@functools.cache
def _has_glyph(character: str) -> bool:
  """Whether the font of pictures has a character."""
  font = get_font(findfont(FontProperties()))
  return font.get_char_index(ord(character)) != 0


def file_name(text: str) -> str:
  """Returns the letters and digits of a text, for the name of a file."""
  return re.sub(r"[^A-Za-z0-9]+", "_", text)[:80].strip("_")
