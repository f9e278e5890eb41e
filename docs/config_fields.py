"""Prints a table of all fields of a run's config.

  python -m docs.config_fields

A field's meaning is the comment above it or behind it, so the table says what
the code says. The documentation has it as a page.
"""

import ast
import dataclasses
import inspect
import re
import typing

from dilocox_jax.config import RunConfig


def comments(kind: type) -> dict[str, str]:
  """Returns what the comments of a dataclass say, by field."""
  lines = inspect.getsource(kind).splitlines()
  (tree,) = ast.parse("\n".join(lines)).body
  assert isinstance(tree, ast.ClassDef)
  found = {}
  for node in tree.body:
    if not isinstance(node, ast.AnnAssign):
      continue
    assert isinstance(node.target, ast.Name)
    _, _, text = lines[(node.end_lineno or 0) - 1].partition("  # ")
    above = node.lineno - 2
    while lines[above].strip().startswith("#"):
      text = lines[above].strip().removeprefix("#").strip() + " " + text
      above -= 1
    found[node.target.id] = text.strip()
  return found


def table(kind: type, prefix: str = "") -> list[str]:
  """Returns the lines of a table of fields, those of sections below it.

  Args:
    kind: A dataclass whose fields are values or dataclasses.
    prefix: What stands before a field's name, e.g. "mesh.".
  """
  hints = typing.get_type_hints(kind)
  texts = comments(kind)
  lines = ["| field | type | default | |", "|---|---|---|---|"]
  sections = []
  for field in dataclasses.fields(kind):
    own = hints[field.name]
    if dataclasses.is_dataclass(own):
      about = str(own.__doc__).splitlines()[0]
      sections += ["", f"## {field.name}", "", about, ""]
      sections += table(typing.cast(type, own), f"{field.name}.")
      continue
    name = own.__name__ if isinstance(own, type) else str(own)
    name = re.sub(r"typing.Optional\[(.*)\]", r"\1 or None", name)
    default = f"`{field.default!r}`"
    if field.default is None:
      default = "the preset's" if prefix == "model." else "the method's"
    cells = f"`{prefix}{field.name}`", name, default, texts[field.name]
    lines.append("| " + " | ".join(c.replace("|", "or") for c in cells) + " |")
  return lines + sections


def page() -> str:
  """Returns the page: how a field is set, and all of them."""
  head = [
    "# All fields of a config",
    "",
    "`--config.SECTION.FIELD=VALUE` sets one on the command line,",
    "`config.SECTION.FIELD = VALUE` in a config file. A field that is left to",
    "the method or to the preset of the model has the value of that.",
    "",
  ]
  return "\n".join(head + table(RunConfig)) + "\n"


if __name__ == "__main__":
  print(page())
