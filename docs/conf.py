"""Builds the documentation: `make docs`."""

import importlib.metadata
import pathlib
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
highlight_language = "text"
html_theme = "furo"
html_title = "dilocox_jax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
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


def write_config_fields(app):
  """Writes the page of all fields, which is made anew at each build."""
  code = runpy.run_path(str(pathlib.Path(app.srcdir) / "config_fields.py"))
  (pathlib.Path(app.srcdir) / "config_fields.md").write_text(code["page"]())


def write_result_pages(app):
  """Writes the pages of the committed sweeps, if they are out of date."""
  script = str(pathlib.Path(app.srcdir) / "result_pages.py")
  runpy.run_path(script)["write_pages"]()


def setup(app):
  """Registers what runs before the build."""
  app.connect("builder-inited", write_config_fields)
  app.connect("builder-inited", write_result_pages)
