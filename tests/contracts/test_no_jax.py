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


# The simulator's report may draw; nothing else there may.
@pytest.mark.parametrize(
  "package, allowed",
  [
    ("plan", set()),
    ("simulate", {"matplotlib"}),
    ("reference", set()),
    ("meeting", set()),
  ],
)
def test_it_loads_without_jax(package, allowed):
  if not (ROOT / "dilocox_jax" / package).is_dir():
    pytest.skip(f"dilocox_jax.{package} does not exist yet")
  loaded = _loaded(LOADED, f"dilocox_jax.{package}")
  files = (ROOT / "dilocox_jax" / package).rglob("[!_]*.py")
  names = [file.relative_to(ROOT).with_suffix("").parts for file in files]
  assert {".".join(parts) for parts in names} <= loaded
  assert not loaded & (HEAVY - allowed)


def test_importing_the_package_loads_nothing_heavy():
  loaded = _loaded(
    "import dilocox_jax, json, sys; print(json.dumps(sorted(sys.modules)))"
  )
  assert "dilocox_jax" in loaded
  assert not loaded & (HEAVY | {"numpy"})
