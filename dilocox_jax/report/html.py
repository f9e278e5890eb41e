"""Turns a page in Markdown into one HTML file that needs no other file.

Pictures become data URIs. HTML in the Markdown is shown as text.
"""

import base64
import contextlib
import html
import os
import pathlib
from collections.abc import Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token

from dilocox_jax import files
from dilocox_jax.metrics.lines import one_line

_LARGEST_PICTURE = 2**24  # Bytes. A larger file is no picture of ours.
_STYLE = """
:root { color-scheme: light; }
body {
  margin: 2rem auto; padding: 0 1.25rem; max-width: 56rem;
  font: 1rem/1.55 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  color: #1c1e21; background: #ffffff;
}
h1 { font-size: 1.7rem; line-height: 1.25; }
h2 {
  font-size: 1.2rem; margin-top: 2.2rem; padding-bottom: .25rem;
  border-bottom: 1px solid #d8dade;
}
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; }
th, td { padding: .3rem .9rem .3rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #b9bcc2; }
td { border-bottom: 1px solid #e7e8eb; font-variant-numeric: tabular-nums; }
code, pre {
  font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: .88rem; background: #f3f4f6; border-radius: 3px;
}
code { padding: .1rem .25rem; overflow-wrap: anywhere; }
pre { padding: .7rem .9rem; white-space: pre-wrap; overflow-wrap: anywhere; }
pre code { padding: 0; }
img { max-width: 100%; height: auto; }
"""


def html_page(title: str, text: str, folder: pathlib.Path) -> str:
  """Returns a page as HTML.

  In place of a picture that is missing, too large (more than 16 MiB) or a link,
  the page shows the picture's caption.

  Args:
    title: Title of the page, as plain text.
    text: The page in Markdown. Paths of pictures are relative to `folder`, as
      in "figures/loss.png".
    folder: Directory of the page.

  Raises:
    RecordError: If the directory of a picture is missing or a link, or if a
      picture that is there cannot be read, e.g. without permission.
  """
  parser = MarkdownIt("commonmark", {"html": False}).enable("table")
  tokens = parser.parse(text)
  _put_pictures_inside(tokens, folder)
  body = parser.renderer.render(tokens, parser.options, {})
  body = body.replace("<table>", '<div class="table"><table>')
  body = body.replace("</table>", "</table></div>")
  return (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n"
    f"</head>\n<body>\n{body}</body>\n</html>\n"
  )


def _put_pictures_inside(tokens: Sequence[Token], folder: pathlib.Path) -> None:
  """Replaces the paths of pictures in tokens by data URIs."""
  for token in tokens:
    if token.type == "image":
      token.attrSet("src", _data_uri(folder, str(token.attrGet("src"))))
    if token.children:
      _put_pictures_inside(token.children, folder)


def _data_uri(folder: pathlib.Path, name: str) -> str:
  """Returns a picture as a data URI.

  The result is "" if the file is missing, too large or a link.
  """
  # A link would let anybody who can write in the directory show any file of
  # this machine on the page, so it does not count as a picture.
  subfolder, _, file_name = name.partition("/")
  with one_line(folder / name, "read"), contextlib.ExitStack() as stack:
    root = files.opened_root(folder)
    stack.callback(os.close, root)
    pictures = files.opened_folder(root, subfolder)
    stack.callback(os.close, pictures)
    content = files.read_file(pictures, file_name, at_most=_LARGEST_PICTURE)
  if content is None:
    return ""
  return f"data:image/png;base64,{base64.b64encode(content).decode()}"
