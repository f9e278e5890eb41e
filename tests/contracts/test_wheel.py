"""The wheel: what is in it, and that it works where nothing else is."""

import email.parser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from typing import Any

import pytest

import dilocox_jax as dx

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "dilocox_jax"
TRAIN = """
import sys
import dilocox_jax as dx
from dilocox_jax.config import from_mapping
config = from_mapping({
  "total_steps": 4,
  "data": {"source": "synthetic", "batch_size": 2, "sequence_length": 16},
  "model": {"preset": "nano", "scan_unroll": 1},
  "sync": {"method": "diloco", "sync_interval": 2},
})
dx.train(config=config, workdir="run")
assert not [name for name in sys.modules if name.startswith("experiments")]
print(dx.__file__)
"""


def run(*command, cwd, env=None):
  result = subprocess.run(
    list(map(str, command)),
    cwd=cwd,
    env=env,
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


@pytest.fixture(scope="module", name="wheel")
def wheel_fixture(tmp_path_factory):
  """A wheel built from a copy of the sources, so the checkout stays clean."""
  copy = tmp_path_factory.mktemp("source")
  for name in ("setup.py", "pyproject.toml", "LICENSE", "README.md"):
    shutil.copy(ROOT / name, copy)
  ignored = shutil.ignore_patterns("__pycache__")
  for name in (PACKAGE, "experiments"):  # The second one must stay out.
    shutil.copytree(ROOT / name, copy / name, ignore=ignored)
  build = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
  run(sys.executable, *build, "--wheel-dir", "dist", ".", cwd=copy)
  (built,) = (copy / "dist").glob("*.whl")
  return built


def test_the_wheel_holds_the_package_its_data_and_the_licence(wheel):
  names = set(zipfile.ZipFile(wheel).namelist())
  files = [path for path in (ROOT / PACKAGE).rglob("*") if path.is_file()]
  files = {str(path.relative_to(ROOT)) for path in files}
  assert {name for name in files if "__pycache__" not in name} <= names
  tops = {name.split("/")[0].removesuffix(".dist-info") for name in names}
  assert {top.partition("-")[0] for top in tops} == {PACKAGE}
  assert any(name.endswith("LICENSE") for name in names)


def metadata_of(wheel) -> Any:
  """Returns the metadata of a wheel, a message with repeated names."""
  with zipfile.ZipFile(wheel) as file:
    (name,) = [each for each in file.namelist() if each.endswith("/METADATA")]
    return email.parser.Parser().parsestr(file.read(name).decode())


def test_the_metadata_say_what_a_registry_shows(wheel):
  metadata = metadata_of(wheel)
  assert metadata["Version"] == dx.__version__
  assert metadata["Description-Content-Type"] == "text/markdown"
  assert metadata.get_payload().startswith("# dilocox_jax\n")
  labels = [url.split(",")[0] for url in metadata.get_all("Project-URL")]
  assert labels == ["Source", "Documentation", "Changelog"]
  assert "Typing :: Typed" in metadata.get_all("Classifier")
  core = [
    requirement
    for requirement in metadata.get_all("Requires-Dist")
    if "extra ==" not in requirement
  ]
  names = [re.split(r"[^\w-]", requirement)[0] for requirement in core]
  assert names == ["chex", "jax", "jaxtyping", "ml-dtypes", "numpy", "optax"]


@pytest.mark.slow
def test_the_installed_wheel_trains_outside_the_clone(wheel, tmp_path):
  """In an environment of its own that sees our packages."""
  home = tmp_path / "venv"
  venv.create(home, with_pip=False, symlinks=True)
  python = home / "bin" / "python"
  # A path file inside a folder added by a path file is not read: the editable
  # install of this checkout stays out.
  purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
  site = pathlib.Path(run(python, "-c", purelib, cwd=home).strip())
  (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
  install = ["install", "--no-deps", "--no-index", wheel]
  run(sys.executable, "-m", "pip", "--python", python, *install, cwd=home)
  (tmp_path / "train.py").write_text(TRAIN)
  assert str(home) in run(python, "train.py", cwd=tmp_path)
  assert (tmp_path / "run" / "report.md").exists()


# Prints what the README prints, from the wheel alone.
README_SNIPPET = """
import doctest, pathlib, sys
result = doctest.testfile("README.md", module_relative=False)
assert result.attempted > 5 and not result.failed, result
import dilocox_jax as dx
assert "site-packages" in dx.__file__, dx.__file__
assert not {"flax", "orbax", "grain", "rich", "obstore"} & set(sys.modules)
"""
# Rounds of a method whose messages travel later, and the line of a name that
# needs an extra.
BEYOND_SNIPPET = """
import jax, jax.numpy as jnp, optax
import dilocox_jax as dx
from dilocox_jax.plan.schedule.methods import overlap_loco

def step(params, state, batch):
  zero = jnp.float32(0)
  return params - 0.1 * (params - batch), state, (zero, zero)

rounds = dx.make_rounds(
  overlap_loco(4, 2), step, optax.sgd(1.0), num_replicas=2,
  exchange=dx.exchange("int(bits=1)", feedback=1.0),
)
print(type(rounds).__name__)
try:
  dx.train
except ImportError as error:
  print(error)
"""


def install_alone(wheel, home, *options):
  """Makes an environment that has a wheel and what the wheel requires.

  Args:
    wheel: Path of the wheel.
    home: Folder of the environment.
    *options: Further arguments of `pip install`.

  Returns:
    The environment's interpreter.
  """
  venv.create(home, with_pip=False, symlinks=True)
  python = home / "bin" / "python"
  pip = ["-m", "pip", "--python", python, "install", "--quiet"]
  run(sys.executable, *pip, wheel, *options, cwd=home)
  return python


def run_the_readme(python, folder):
  """Runs the README's snippet, and more of the core, by an interpreter."""
  environment = {"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu"}
  shutil.copy(ROOT / "README.md", folder)
  for name, text in {
    "snippet.py": README_SNIPPET,
    "beyond.py": BEYOND_SNIPPET,
  }.items():
    (folder / name).write_text(text)
  run(python, "snippet.py", cwd=folder, env=environment)
  printed = run(python, "beyond.py", cwd=folder, env=environment)
  kind, message = printed.splitlines()
  assert kind == "Rounds"
  assert message.endswith("pip install 'dilocox_jax[train]'")
  said = run(python, "-m", "dilocox_jax", cwd=folder, env=environment)
  assert "Extras: none (for others: pip install" in said
  assert "python -m experiments" not in said


@pytest.mark.slow
def test_the_wheel_alone_runs_the_readme(wheel, tmp_path):
  """Downloads the packages of the core."""
  python = install_alone(wheel, tmp_path / "venv")
  run_the_readme(python, tmp_path)


@pytest.mark.slow
def test_the_lowest_declared_versions_run_the_readme(wheel, tmp_path):
  """Downloads the packages of the core in the versions that setup.py names."""
  lowest = [
    requirement.replace(">=", "==")
    for requirement in metadata_of(wheel).get_all("Requires-Dist")
    if "extra ==" not in requirement
  ]
  python = install_alone(wheel, tmp_path / "venv", *lowest)
  run_the_readme(python, tmp_path)
