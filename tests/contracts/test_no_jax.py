import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Imports a package and everything below it, then prints what was loaded.
LOADED = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
  importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""
HEAVY = {"chex", "flax", "grain", "jax", "jaxlib", "matplotlib", "ml_dtypes"}
HEAVY |= {"optax", "orbax", "rich", "scipy", "tensorboard"}


def _loaded(program: str, *arguments: str) -> set[str]:
  result = subprocess.run(
    [sys.executable, "-c", program, *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  return set(json.loads(result.stdout))


@pytest.mark.parametrize("package", ["plan", "reference", "meeting"])
def test_it_loads_without_jax(package):
  loaded = _loaded(LOADED, f"dilocox_jax.{package}")
  files = (ROOT / "dilocox_jax" / package).rglob("[!_]*.py")
  names = [file.relative_to(ROOT).with_suffix("").parts for file in files]
  assert {".".join(parts) for parts in names} <= loaded
  assert not loaded & HEAVY


@pytest.mark.parametrize(
  ("module", "heavy"),
  [("dilocox_jax", HEAVY | {"numpy"}), ("dilocox_jax.config", HEAVY)],
)
def test_importing_what_help_needs_loads_nothing_heavy(module, heavy):
  loaded = _loaded(
    f"import {module}, json, sys; print(json.dumps(sorted(sys.modules)))"
  )
  assert module in loaded
  assert not loaded & heavy
