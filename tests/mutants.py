"""Changes the code in random places, and says which changes no test notices.

  python -m tests.mutants [--places=200] [--seed=0]
  python -m tests.mutants --packages=report,metrics --nearest

cosmic-ray makes the mutants and applies them in build/mutants, a clone of the
last commit. A mutant is tried by the tests of its own module first, then by
those of its folder, then by all: most are caught in seconds. With --nearest it
does not meet the tests of other folders. The run takes hours, and the same
command goes on where it was stopped. Remove build/mutants to begin anew.
"""

import argparse
import os
import pathlib
import random
import re
import subprocess
import sys

from cosmic_ray.work_db import use_db

ROOT = pathlib.Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "mutants"
CONFIG = "tests/mutants.toml"
SESSION = "build/mutants.sqlite"
# The config that cosmic-ray reads, which has the flags of this run.
RUN_CONFIG = "build/mutants.toml"
# Programs have tests of their own, and some in the folder of what they call.
ALSO_TESTED_IN = {"experiments": ["api"]}
# Most `|` stand in annotations, where any other operator is an error at import.
TRIVIAL = "core/ReplaceBinaryOperator_BitOr"


def main() -> None:
  """Makes a session, goes on with it, or runs the tests of one mutant."""
  parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
  parser.add_argument("--places", type=int, default=200)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument(
    "--packages",
    default="",
    help="names of packages, with commas between; by default all",
  )
  parser.add_argument(
    "--nearest",
    action="store_true",
    help="try the tests of a mutant's own folder alone",
  )
  parser.add_argument("--notice", action="store_true", help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.notice:
    found = stages(changed_module(), flags.nearest)
    sys.exit(not all(map(passes, found)))
  if not COPY.exists():
    subprocess.run(["git", "clone", "-q", ROOT, COPY], check=True)
    (COPY / "build").mkdir()
  # A run that was killed has left its mutant.
  subprocess.run(["git", "checkout", "-q", "."], cwd=COPY, check=True)
  packages = [name for name in flags.packages.split(",") if name]
  write_config(packages, flags.nearest)
  if not (COPY / SESSION).exists():
    cosmic_ray("cli", "init", "--force", RUN_CONFIG, "build/all.sqlite")
    draw(flags.places, flags.seed)
  cosmic_ray("cli", "exec", RUN_CONFIG, SESSION)
  cosmic_ray("tools.report", "--surviving-only", "--show-diff", SESSION)


def cosmic_ray(module: str, *arguments: str) -> None:
  """Runs a program of cosmic-ray in the clone; `python` there is this one."""
  path = (
    f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
  )
  command = [sys.executable, "-m", f"cosmic_ray.{module}", *arguments]
  subprocess.run(
    command, cwd=COPY, env={**os.environ, "PATH": path}, check=True
  )


def write_config(packages: list[str], is_nearest: bool) -> None:
  """Writes what cosmic-ray reads.

  Args:
    packages: Names of the packages to change; empty for all.
    is_nearest: Whether the tests of other folders are left out.
  """
  lines = (COPY / CONFIG).read_text().splitlines(keepends=True)
  if packages:
    lines = [line for line in lines if is_kept(line, packages)]
  text = "".join(lines)
  if is_nearest:
    text = text.replace("--notice", "--notice --nearest")
  (COPY / RUN_CONFIG).write_text(text)


def is_kept(line: str, packages: list[str]) -> bool:
  """Returns whether a line names one of the packages, or is no package."""
  found = re.fullmatch(r'  "(.+)",\n', line)
  return not found or pathlib.Path(found[1]).name in packages


def draw(places: int, seed: int) -> None:
  """Keeps one mutant in each of some places, in random order.

  Args:
    places: Number of places.
    seed: Seed of the order, and of the mutant in each place.
  """
  by_place: dict[tuple, list] = {}
  with use_db(COPY / "build/all.sqlite") as every:
    for item in every.work_items:
      (mutation,) = item.mutations
      if not mutation.operator_name.startswith(TRIVIAL):
        place = (str(mutation.module_path), mutation.start_pos)
        by_place.setdefault(place, []).append((mutation.operator_name, item))
  rng = random.Random(seed)
  drawn = rng.sample(sorted(by_place), min(places, len(by_place)))
  half = COPY / "build/half.sqlite"
  with use_db(half) as session:
    session.clear()
    choices = [sorted(by_place[place], key=lambda c: c[0]) for place in drawn]
    session.add_work_items([rng.choice(each)[1] for each in choices])
  half.rename(COPY / SESSION)


def changed_module() -> pathlib.Path:
  """Returns the module that differs from the commit, relative to the root."""
  command = ["git", "diff", "--name-only"]
  return pathlib.Path(subprocess.check_output(command, text=True).strip())


def package_of(module: pathlib.Path) -> str:
  """Returns the package of a module: "report", or "experiments"."""
  top, *inner = module.parts
  return inner[0] if top == "dilocox_jax" else top


def stages(module: pathlib.Path, is_nearest: bool) -> list[list[str]]:
  """Returns pytest's arguments, the likeliest to fail first, all tests last.

  Args:
    module: Path of the module that is changed.
    is_nearest: Whether tests of other folders are left out.
  """
  package = package_of(module)
  names = [package, *ALSO_TESTED_IN.get(package, ())]
  folders = [pathlib.Path("tests", name) for name in names]
  inside = [str(folder) for folder in folders if folder.is_dir()]
  found = [own_tests(module, folders[0]), inside]
  if not is_nearest:
    # A linter's taste is no behavior.
    found.append(["-n", "2", "--ignore=tests/contracts/test_lint.py"])
  return [stage for stage in found if stage]


def own_tests(module: pathlib.Path, folder: pathlib.Path) -> list[str]:
  """Returns the tests that are named after a module or a folder above it.

  Those of `experiments/tables/dilocox.py` are in `test_tables.py`.
  """
  top, *inner, _ = module.parts
  above = inner[1:] if top == "dilocox_jax" else inner
  names = [module.stem, *above]
  found = {
    str(path) for name in names for path in folder.rglob(f"test_{name}*.py")
  }
  return sorted(found)


def passes(arguments: list[str]) -> bool:
  """Runs tests up to the first that fails; a stage without tests passes."""
  command = [sys.executable, "-m", "pytest", "-x", "-q", *arguments]
  return subprocess.run(command).returncode in (0, 5)


if __name__ == "__main__":
  main()
