"""Lists the programs with a line each.

python -m experiments
"""

import ast
import pathlib
import re

_FOLDER = pathlib.Path(__file__).parent
# Programs that a user starts end with this call of absl. A module with a plain
# `main` is started only by another program, and has no --help.
_RUNS = re.compile(r"^  app\.run\(", re.MULTILINE)
_GROUPS = {
  "experiments": "Programs",
  "experiments.tools": "Checks and measurements of machines and links",
}


def programs(folder: pathlib.Path) -> dict[str, str]:
  """Returns the first line of each program's docstring, by module name.

  A program is a file that calls `app.run`. The files are read but not imported,
  because importing would define their flags.

  Args:
    folder: Folder of the programs; folders inside it are not searched.
  """
  lines = {}
  for path in sorted(folder.glob("*.py")):
    text = path.read_text()
    if not _RUNS.search(text):
      continue
    docstring = ast.get_docstring(ast.parse(text)) or ""
    lines[path.stem] = docstring.partition("\n")[0]
  return lines


def listing() -> str:
  """Returns the list of all programs, with a line for each."""
  lines = []
  for package, title in _GROUPS.items():
    folder = _FOLDER.joinpath(*package.split(".")[1:])
    lines += [f"{title}: python -m {package}.NAME --help", ""]
    described = programs(folder)
    width = max(map(len, described))
    for name, line in described.items():
      lines.append(f"  {name:{width}}  {line}")
    lines.append("")
  return "\n".join(lines).rstrip()


if __name__ == "__main__":
  print(listing())
