"""Who imports whom, and what comes along with it."""

import ast
import graphlib
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINT_IMPORTS = "from importlinter.cli import lint_imports_command as c; c()"


def test_the_package_keeps_every_contract():
  command = [sys.executable, "-c", LINT_IMPORTS, "--no-cache", "--no-logo"]
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  if result.returncode:
    pytest.fail(result.stdout + result.stderr, pytrace=False)


# Imports a module and everything below it, then prints what was loaded.
LOADED = """
import importlib, json, pkgutil, sys
module = importlib.import_module(sys.argv[1])
for each in pkgutil.walk_packages(
  module.__path__ if sys.argv[2:] else [], module.__name__ + "."
):
  importlib.import_module(each.name)
print(json.dumps(sorted(sys.modules)))
"""
HEAVY = {"chex", "flax", "grain", "jax", "jaxlib", "matplotlib", "ml_dtypes"}
HEAVY |= {"optax", "orbax", "rich", "scipy"}


@pytest.mark.parametrize(
  ("module", "arguments", "heavy"),
  [
    *(
      (name, ["all"], HEAVY)
      for name in ("gap", "plan", "reference", "mailbox_protocol")
    ),
    ("config", [], HEAVY),
    ("", [], HEAVY | {"numpy"}),
  ],
)
def test_what_help_and_plans_need_loads_nothing_heavy(module, arguments, heavy):
  name = f"dilocox_jax.{module}".rstrip(".")
  command = [sys.executable, "-c", LOADED, name, *arguments]
  loaded = set(json.loads(subprocess.check_output(command, cwd=ROOT)))
  assert name in loaded and not loaded & heavy


PACKAGES = {
  path.relative_to(ROOT): path.read_text()
  for folder in ("dilocox_jax", "experiments")
  for path in sorted((ROOT / folder).rglob("*.py"))
}


def imported_names(text):
  """Names of the modules that a file may import, wherever in the file."""
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
      yield node.module
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_modules_of_experiments_do_not_import_each_other_in_a_circle():
  modules = {
    ".".join(path.with_suffix("").parts): text
    for path, text in PACKAGES.items()
    if path.parts[0] == "experiments"
  }
  assert "experiments.tools.bench_inner" in modules
  imports = {
    name: set(imported_names(text)) & modules.keys()
    for name, text in modules.items()
  }
  graphlib.TopologicalSorter(imports).prepare()  # Raises for a circle.


# The launcher has the flags of the trainer, and so has a test's trainer.
IMPORTS_OF_PROGRAMS = {
  ("experiments/launch.py", "experiments.train"),
  ("tests/mailbox/cluster_runs.py", "experiments.train"),
  ("tests/mailbox/slow_train.py", "experiments.train"),
}


def test_no_program_is_imported_so_that_flags_are_defined_once():
  programs = {
    ".".join(path.with_suffix("").parts)
    for path, text in PACKAGES.items()
    if path.parts[0] == "experiments"
    and re.search(r"^  app\.run\(main", text, re.MULTILINE)
  }
  assert {"experiments.train", "experiments.tools.bench"} <= programs
  imports = set()
  for folder in ("dilocox_jax", "docs", "experiments", "tests"):
    for path in (ROOT / folder).rglob("*.py"):
      for name in imported_names(path.read_text()):
        if name in programs:
          imports.add((path.relative_to(ROOT).as_posix(), name))
  assert imports == IMPORTS_OF_PROGRAMS


def test_annotations_that_state_shapes_are_executed():
  shaped = re.compile(r"\b(Float|Int|Bool|Integer|UInt)\[")
  names = [
    ".".join(path.with_suffix("").parts)
    for path, text in PACKAGES.items()
    if shaped.search(text)
  ]
  assert len(names) > 5
  for name in names:
    spec = importlib.util.find_spec(name)
    assert type(getattr(spec, "loader", None)).__module__.startswith(
      "jaxtyping"
    )
