import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = ("dilocox_jax", "experiments")


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
  for name in PACKAGES:
    ignored = shutil.ignore_patterns("__pycache__")
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
    str(file.relative_to(ROOT))
    for package in PACKAGES
    for file in (ROOT / package).rglob("*.py")
  }
  folder = ROOT / "dilocox_jax" / "simulate" / "data"
  presets = {str(file.relative_to(ROOT)) for file in folder.iterdir()}
  assert presets and modules | presets <= names
  assert any(name.endswith("LICENSE") for name in names)


def test_the_installed_packages_are_the_wheels(python, tmp_path):
  origin = "import dilocox_jax, experiments; print(dilocox_jax.__file__)"
  assert str(python.parents[1]) in _run(python, "-c", origin, cwd=tmp_path)


def test_the_installed_wheel_explains_how_to_train(python, tmp_path):
  text = _run(python, "-m", "experiments.train", "--help", cwd=tmp_path)
  assert "--config" in text
  assert "--workdir" in text
