import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

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
dx.train(config, "run")
assert not [name for name in sys.modules if name.startswith("experiments")]
"""


def _run(*command, cwd: pathlib.Path) -> str:
  result = subprocess.run(
    list(map(str, command)), cwd=cwd, capture_output=True, text=True
  )
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  """A wheel built from a copy of the sources, so the checkout stays clean."""
  copy = tmp_path_factory.mktemp("source")
  for name in ("setup.py", "pyproject.toml", "LICENSE"):
    shutil.copy(ROOT / name, copy)
  ignored = shutil.ignore_patterns("__pycache__")
  for name in (PACKAGE, "experiments"):  # The second one must stay out.
    shutil.copytree(ROOT / name, copy / name, ignore=ignored)
  build = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
  _run(sys.executable, *build, "--wheel-dir", "dist", ".", cwd=copy)
  (built,) = (copy / "dist").glob("*.whl")
  return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
  """An environment of its own that holds the wheel and sees our packages."""
  home = tmp_path_factory.mktemp("venv")
  venv.create(home, with_pip=False, symlinks=True)
  python = home / "bin" / "python"
  # A path file inside a folder added by a path file is not read: the editable
  # install of this checkout stays out.
  purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
  site = pathlib.Path(_run(python, "-c", purelib, cwd=home).strip())
  (site / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n")
  install = ["install", "--no-deps", "--no-index", wheel]
  _run(sys.executable, "-m", "pip", "--python", python, *install, cwd=home)
  return python


def test_the_wheel_holds_every_module_the_presets_and_the_licence(wheel):
  names = set(zipfile.ZipFile(wheel).namelist())
  modules = {
    str(file.relative_to(ROOT)) for file in (ROOT / PACKAGE).rglob("*.py")
  }
  folder = ROOT / "dilocox_jax" / "simulate" / "data"
  presets = {str(file.relative_to(ROOT)) for file in folder.iterdir()}
  assert presets and modules | presets <= names
  assert any(name.endswith("LICENSE") for name in names)


def test_the_wheel_holds_one_package(wheel):
  names = zipfile.ZipFile(wheel).namelist()
  tops = {name.split("/")[0] for name in names}
  assert {top for top in tops if not top.endswith(".dist-info")} == {PACKAGE}


def test_the_installed_package_is_the_wheels(python, tmp_path):
  origin = "import dilocox_jax; print(dilocox_jax.__file__)"
  assert str(python.parents[1]) in _run(python, "-c", origin, cwd=tmp_path)


@pytest.mark.slow
def test_the_installed_wheel_trains_outside_the_clone(python, tmp_path):
  (tmp_path / "train.py").write_text(TRAIN)
  _run(python, "train.py", cwd=tmp_path)
  assert (tmp_path / "run" / "report.md").exists()
