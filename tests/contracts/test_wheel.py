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
dx.train(config=config, workdir="run")
assert not [name for name in sys.modules if name.startswith("experiments")]
print(dx.__file__)
"""


def run(*command, cwd):
  result = subprocess.run(
    list(map(str, command)), cwd=cwd, capture_output=True, text=True
  )
  assert result.returncode == 0, result.stdout + result.stderr
  return result.stdout


@pytest.fixture(scope="module", name="wheel")
def wheel_fixture(tmp_path_factory):
  """A wheel built from a copy of the sources, so the checkout stays clean."""
  copy = tmp_path_factory.mktemp("source")
  for name in ("setup.py", "pyproject.toml", "LICENSE"):
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
