import ast
import collections
import importlib.metadata
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import dilocox_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
REFERENCE = "dilocox_jax/reference/"
MAX_FILE_LINES = 400


def _sources(*folders: str) -> dict[str, str]:
  """Texts of the Python files below the folders, by path from the root."""
  files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
  return {
    str(file.relative_to(ROOT)): file.read_text() for file in sorted(files)
  }


PACKAGES = _sources("dilocox_jax", "experiments")


def _tracked_files() -> list[str]:
  """Files of the repository, those not yet added to it included."""
  if not (shutil.which("git") and (ROOT / ".git").exists()):
    pytest.skip("not a git checkout")
  listed = subprocess.run(
    ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  names = listed.stdout.split("\0")
  return [name for name in names if (ROOT / name).is_file()]


def test_no_file_is_longer_than_a_reader_can_hold():
  lengths = {path: len(text.splitlines()) for path, text in PACKAGES.items()}
  long = {p: lines for p, lines in lengths.items() if lines > MAX_FILE_LINES}
  assert not long


def test_every_folder_of_modules_is_a_package():
  folders = {pathlib.Path(path).parent for path in PACKAGES}
  bare = [str(f) for f in folders if not (ROOT / f / "__init__.py").exists()]
  assert not bare, "\n".join(bare)


def test_no_module_is_called_utils():
  named = [path for path in PACKAGES if re.search(r"util|helper|misc", path)]
  assert not named, "\n".join(named)


def test_nobody_indexes_optimizer_state():
  """`optax.tree_utils.tree_get` finds a field whatever the chain looks like."""
  indexed = re.compile(r"state\[-?\d|state\)\[-?\d")
  found = [
    f"{path}:{number}: {line.strip()}"
    for path, text in PACKAGES.items()
    for number, line in enumerate(text.splitlines(), start=1)
    if indexed.search(line)
  ]
  assert not found, "\n".join(found)


def test_every_foreign_import_is_a_declared_requirement():
  declared = {
    _normal(re.split(r"[^\w-]", requirement)[0])
    for requirement in _requirements()
  }
  own = {"dilocox_jax", "experiments"} | set(sys.stdlib_module_names)
  distributions = importlib.metadata.packages_distributions()
  undeclared = []
  for path, text in PACKAGES.items():
    for name in _imported(ast.parse(text)) - own:
      sources = distributions.get(name, ())
      if not declared & {_normal(source) for source in sources}:
        undeclared.append(f"{path} imports {name}")
  assert not undeclared, "\n".join(undeclared)


def _normal(distribution: str) -> str:
  return distribution.replace("_", "-").lower()


def _requirements() -> list[str]:
  """The run-time requirements that setup.py states."""
  for node in ast.parse((ROOT / "setup.py").read_text()).body:
    if (
      isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RUNTIME"
    ):
      return ast.literal_eval(node.value)
  raise AssertionError("setup.py states no RUNTIME requirements")


def _imported(tree: ast.AST) -> set[str]:
  names = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names |= {alias.name.split(".")[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
      names.add(node.module.split(".")[0])
  return names


def test_annotations_that_state_shapes_are_executed():
  shaped = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "dilocox_jax").rglob("*.py"))
    if re.search(r"\b(Float|Int|Bool|Integer|UInt)\[", path.read_text())
  ]
  assert len(shaped) > 5
  for name in shaped:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert type(spec.loader).__module__.startswith("jaxtyping"), name


@pytest.mark.parametrize(
  "what, pattern",
  [
    # Written so that this file does not match itself.
    ("index option", r"--(?:extra-)?index[-]url|--find[-]links"),
    ("machine path", r"(?<![\w.])/(?:root|work|home)[/]\w"),
  ],
)
def test_no_file_names_a_machine_or_an_index(what, pattern):
  found = []
  for name in _tracked_files():
    text = (ROOT / name).read_bytes().decode(errors="replace")
    if match := re.search(pattern, text):
      found.append(f"{name}: {match.group()}")
  assert not found, f"{what}: {found}"


@pytest.mark.parametrize("version", ["py311", "py312"])
def test_constraints_pin_versions_and_say_nothing_of_where_from(version):
  text = (ROOT / "constraints" / f"{version}.txt").read_text()
  pins = [line for line in text.splitlines() if not line.startswith("#")]
  loose = [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)]
  assert len(pins) > len(_requirements())
  assert not loose, "\n".join(loose)


def _public_definitions(tree: ast.Module) -> list[str]:
  """Public names that a module defines at its top level."""
  names = []
  for node in tree.body:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
      names.append(node.name)
    elif isinstance(node, ast.Assign):
      names += [t.id for t in node.targets if isinstance(t, ast.Name)]
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
      names.append(node.target.id)
  return [name for name in names if not name.startswith("_")]


def test_no_public_name_of_the_package_is_defined_twice():
  homes = collections.defaultdict(list)
  for path, text in _sources("dilocox_jax").items():
    if path.startswith(REFERENCE):
      continue  # A numpy twin has the name of what it is the twin of.
    for name in _public_definitions(ast.parse(text)):
      homes[name].append(path)
  twice = {name: paths for name, paths in homes.items() if len(paths) > 1}
  assert not twice


def _definitions(tree: ast.AST) -> list[str]:
  """Functions, methods and classes, but for Python's own special names."""
  return [
    node.name
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef | ast.ClassDef)
    and not re.fullmatch(r"__\w+__", node.name)
  ]


def _names_in_use(tree: ast.AST) -> set[str]:
  names = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Name | ast.Attribute):
      names.add(node.id if isinstance(node, ast.Name) else node.attr)
    # The plan registers functions that need JAX by their place.
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
      names.update(re.findall(r"^dilocox_jax[\w.]*:(\w+)$", node.value))
  return names


# Called by name from a config, a registry or another program, with the reason.
CALLED_FROM_OUTSIDE = {
  "get_config": "config files are read by ml_collections",
  "register_optimizer": "those of the package are optax's",
  "attends": "whoever exchanges through a mailbox asks it",
  **dict.fromkeys(("readable", "readinto"), "io calls those of a raw file"),
}


def test_no_function_is_there_for_tests_alone():
  trees = {path: ast.parse(text) for path, text in PACKAGES.items()}
  used = set().union(*(_names_in_use(tree) for tree in trees.values()))
  used |= set(dir(dilocox_jax))  # The front door is for users.
  unused = [
    f"{path}: {name}"
    for path, tree in trees.items()
    for name in _definitions(tree)
    if not path.startswith(REFERENCE)  # Tests and readers use it.
    if name not in used | CALLED_FROM_OUTSIDE.keys()
  ]
  assert not unused, "\n".join(unused)
