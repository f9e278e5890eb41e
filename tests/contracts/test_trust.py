"""What is read executes nothing, and what is written follows no link.

docs/clusters.md has the exceptions: config files and files of --parts are
Python code, and whoever starts a program names them.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.contracts.test_house import PACKAGES

EXECUTING = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Files that do not write by `dilocox_jax.files`, each with the reason.
OWN_WRITING = {
  "dilocox_jax/files.py": "it is the way",
  "dilocox_jax/training/digests.py": "in a folder that Orbax has just made",
  "dilocox_jax/distributed/processes.py": "an empty file of a random name",
  "dilocox_jax/metrics/work_directory.py": "a new file of a random name",
  "experiments/runtime/command_line.py": "the null device",
}


def _executes(node: ast.AST) -> bool:
  """Whether a node could execute what it reads."""
  match node:
    case ast.Import(names):
      return any(each.name.split(".")[0] in EXECUTING for each in names)
    case ast.ImportFrom(module, names):
      imported = {str(module).split(".")[0], *(each.name for each in names)}
      return bool(imported & EXECUTING)
    case ast.Name(name):
      return name in ("eval", "exec")
    case ast.Attribute(ast.Name("builtins"), name):
      return name in ("eval", "exec")
    case ast.keyword("allow_pickle", value):
      return not (isinstance(value, ast.Constant) and value.value is False)
    case ast.keyword("weights_only", value):
      return not (isinstance(value, ast.Constant) and value.value is True)
  return False


def _writes(node: ast.AST) -> bool:
  """Whether a node opens a file for writing by itself."""
  match node:
    case ast.Call(ast.Name("open"), [_, ast.Constant(mode), *_]):
      return bool(set(str(mode)) & set("wax+"))
    case ast.Call(ast.Attribute(_, "open"), [ast.Constant(mode), *_]):
      return bool(set(str(mode)) & set("wax+"))
    case ast.Call(ast.Attribute(ast.Name("os"), "open"), [_, flags, *_]):
      return "O_WR" in ast.unparse(flags)
    case ast.Call(ast.Attribute(ast.Name("np"), name)):
      return name in ("save", "savez", "savez_compressed", "savetxt")
    case ast.Call(ast.Attribute(_, name)):
      return name in ("write_text", "write_bytes", "touch")
  return False


def _found(text: str, is_wrong) -> Iterator[str]:
  for node in ast.walk(ast.parse(text)):
    if is_wrong(node):
      line = getattr(node, "lineno", "?")
      yield f"{line}: {ast.unparse(node)}"


@pytest.mark.parametrize("is_wrong", [_executes, _writes])
def test_no_file_is_read_or_written_so_that_a_stranger_gains(is_wrong):
  found = [
    f"{path}:{where}"
    for path, text in PACKAGES.items()
    if is_wrong is _executes or path not in OWN_WRITING
    for where in _found(text, is_wrong)
  ]
  assert not found, "\n".join(found)


def test_every_excuse_to_write_is_needed():
  excused = {p: list(_found(PACKAGES[p], _writes)) for p in OWN_WRITING}
  assert [path for path, found in excused.items() if not found] == []


@pytest.mark.parametrize(
  "text, is_wrong",
  [
    ("import pickle", _executes),
    ("from marshal import loads", _executes),
    ("from numpy.compat import pickle", _executes),
    ("run = eval", _executes),
    ("builtins.exec(x)", _executes),
    ("np.load(f, allow_pickle=True)", _executes),
    ("np.load(f, allow_pickle=given)", _executes),
    ("open(path, 'w')", _writes),
    ("path.open('ab')", _writes),
    ("path.write_text(x)", _writes),
  ],
)
def test_each_kind_is_seen(text, is_wrong):
  assert list(_found(text, is_wrong))
  assert not list(_found(f'"""Not {text}"""', is_wrong))
