"""Builds the documentation: `make docs`."""

import importlib.metadata
import inspect
import pathlib
import re
import runpy

project = "dilocox_jax"
author = "The dilocox_jax authors"
copyright = author  # noqa: A001
release = importlib.metadata.version("dilocox_jax")
version = release

extensions = [
  "myst_parser",
  "sphinx.ext.autodoc",
  "sphinx.ext.doctest",
  "sphinx.ext.napoleon",
  "sphinx_copybutton",
]
exclude_patterns = ["notes"]
highlight_language = "text"
html_theme = "furo"
html_title = "dilocox_jax"
html_static_path = []
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
# A single backtick marks code in this project's docstrings.
default_role = "code"

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# Names of fields are not links; several classes have fields of one name.
suppress_warnings = ["ref.python"]
napoleon_numpy_docstring = False
napoleon_use_ivar = True

SECTIONS = r"(Args|Attributes|Returns|Raises|Yields):"
REMARKS = r"(Wire|Source|Differs): "


def show_examples_as_code(app, what, name, obj, options, lines):
  """Marks indented blocks of a docstring as code.

  The docstrings indent an example, and leave out the "::" with which
  reStructuredText marks one.
  """
  del app, what, name, obj, options
  text = inspect.cleandoc("\n".join(lines)).split("\n")
  lines[:] = marked(text)


def marked(lines: list[str]) -> list[str]:
  """Returns lines of a docstring, with "::" before every indented block."""
  done: list[str] = []
  in_section = False
  for number, line in enumerate(lines):
    if line and not line.startswith(" "):
      in_section = bool(re.fullmatch(SECTIONS, line))
      if re.match(REMARKS, line) and done and done[-1].strip():
        done.append("")  # A remark is a paragraph of its own.
    starts = line.startswith("  ") and number and not lines[number - 1].strip()
    last = next((old for old in reversed(done) if old.strip()), "")
    inside = last.startswith(" ")
    if starts and not in_section and not inside:
      done += ["::", ""]
    done.append(line)
  return done


def show_signs_as_they_are(app, what, name, obj, options, lines):
  """Escapes stars and bars, which the docstrings use for arithmetic alone."""
  del app, what, name, obj, options
  code_indent = None
  for number, line in enumerate(lines):
    indent = len(line) - len(line.lstrip())
    if code_indent is not None and line.strip() and indent <= code_indent:
      code_indent = None
    if code_indent is None:
      lines[number] = escaped(line)
      if line.rstrip().endswith("::"):
        code_indent = indent


def escaped(line: str) -> str:
  """Returns a line whose stars and bars outside of code mean themselves."""
  line = re.sub(r"(?<!:)(`[^`]+`)(?=\w)", r"\1\\ ", line)  # `Name`s
  parts = re.split(r"(`[^`]*`)", line)
  parts[::2] = [re.sub(r"(?<!\\)([*|])", r"\\\1", part) for part in parts[::2]]
  return "".join(parts)


def write_config_fields(app):
  """Writes the page of all fields, which is made anew at each build."""
  code = runpy.run_path(str(pathlib.Path(app.srcdir) / "config_fields.py"))
  (pathlib.Path(app.srcdir) / "config_fields.md").write_text(code["page"]())


def setup(app):
  """Registers what runs before and after napoleon reads a docstring."""
  app.connect("builder-inited", write_config_fields)
  app.connect("autodoc-process-docstring", show_examples_as_code, priority=100)
  app.connect("autodoc-process-docstring", show_signs_as_they_are, priority=900)
