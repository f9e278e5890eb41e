import configparser
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONTRACTS = ROOT / ".importlinter"
LINT_IMPORTS = "from importlinter.cli import lint_imports_command as c; c()"


def _lint_imports(folder: pathlib.Path, *arguments: str):
  return subprocess.run(
    [sys.executable, "-c", LINT_IMPORTS, "--no-cache", "--no-logo"]
    + ["--config", str(CONTRACTS), *arguments],
    cwd=folder,
    capture_output=True,
    text=True,
  )


def _modules_of(contract: str) -> list[str]:
  parser = configparser.ConfigParser()
  parser.read(CONTRACTS)
  layers = parser[f"importlinter:contract:{contract}"]["layers"]
  for mark in "|:()":
    layers = layers.replace(mark, " ")
  return layers.split()


@pytest.fixture
def skeleton(tmp_path):
  """An empty package that has every module the contracts speak of."""
  root = tmp_path / "dilocox_jax"
  inside = {"training": "training", "plan": "plan"}
  homes = [root, *(root / folder for folder in inside)]
  for home, contract in zip(homes, ["flow", *inside.values()], strict=True):
    for module in _modules_of(contract):
      folder = home / module
      folder.mkdir(parents=True, exist_ok=True)
      (folder / "__init__.py").touch()
      (folder / "part.py").touch()
    (home / "part.py").unlink(missing_ok=True)
    (home / "__init__.py").touch()
  return tmp_path


def test_the_package_keeps_every_contract():
  result = _lint_imports(ROOT)
  if result.returncode:
    pytest.fail(result.stdout + result.stderr, pytrace=False)


def test_the_simulator_is_kept_from_every_module_but_plan_and_bytes():
  # The trainer is its independent neighbour in the flow already.
  allowed = {"training", "plan", "pytypes", "mapping", "checks", "trees"}
  allowed |= {"aggregators", "codecs", "distributed"}
  assert set(_modules_of("simulator")) == set(_modules_of("flow")) - allowed


def test_an_empty_skeleton_breaks_no_contract(skeleton):
  result = _lint_imports(skeleton)
  assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
  "contract, importer, imported",
  [
    ("flow", "plan/adaptive", "dilocox_jax.codecs"),
    ("training", "training/build", "dilocox_jax.training.trainer"),
    ("plan", "plan/schedule", "dilocox_jax.plan.collective.part"),
    ("flow", "config", "dilocox_jax.training.build"),
    ("flow", "inner", "dilocox_jax.aggregators"),
    ("flow", "aggregators", "dilocox_jax.outer.part"),
    ("flow", "training/trainer", "dilocox_jax.simulate"),
    ("flow", "pytypes", "dilocox_jax.plan"),
    ("stations", "outer", "dilocox_jax.models"),
    ("stations", "aggregators", "dilocox_jax.data.part"),
    ("inner", "inner", "dilocox_jax.codecs"),
    ("simulator", "simulate", "dilocox_jax.config"),
    ("simulator", "simulate", "dilocox_jax.outer"),
    ("no-jax", "plan/collective", "jax.numpy"),
    ("no-jax", "reference", "optax"),
    ("edge", "config", "ml_collections"),
    ("edge", "training/trainer", "absl.logging"),
    ("figures", "metrics", "matplotlib.pyplot"),
  ],
)
def test_a_planted_import_breaks_its_contract(
  skeleton, contract, importer, imported
):
  planted = skeleton / "dilocox_jax" / importer / "part.py"
  planted.write_text(f"import {imported}\n")
  result = _lint_imports(skeleton, "--contract", contract)
  assert result.returncode == 1, result.stdout + result.stderr
  assert "BROKEN" in result.stdout
  assert f"dilocox_jax.{importer.replace('/', '.')}" in result.stdout


def test_a_module_without_a_layer_breaks_the_flow(skeleton):
  (skeleton / "dilocox_jax" / "newcomer.py").touch()
  result = _lint_imports(skeleton, "--contract", "flow")
  assert result.returncode == 1
  assert "newcomer" in result.stdout
