"""Changes the core in random places, and says which changes no test notices.

  python -m tests.mutants [--places=200] [--seed=0]

cosmic-ray makes the mutants and applies them in build/mutants, a clone of the
last commit. A mutant is tried by the tests of its own module first, then by
those of its folder, then by all: most are caught in seconds. The run takes
hours, and the same command goes on where it was stopped. Remove build/mutants
to begin anew.
"""

import argparse
import os
import pathlib
import random
import subprocess
import sys

from cosmic_ray.work_db import use_db

ROOT = pathlib.Path(__file__).resolve().parents[1]
COPY = ROOT / "build" / "mutants"
CONFIG = "tests/mutants.toml"
SESSION = "build/mutants.sqlite"
# Most `|` stand in annotations, where any other operator is an error at import.
TRIVIAL = "core/ReplaceBinaryOperator_BitOr"


def main() -> None:
  """Makes a session, goes on with it, or runs the tests of one mutant."""
  parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
  parser.add_argument("--places", type=int, default=200)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--notice", action="store_true", help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.notice:
    sys.exit(not all(map(passes, stages(changed_module()))))
  if not COPY.exists():
    subprocess.run(["git", "clone", "-q", ROOT, COPY], check=True)
    (COPY / "build").mkdir()
  # A run that was killed has left its mutant.
  subprocess.run(["git", "checkout", "-q", "."], cwd=COPY, check=True)
  if not (COPY / SESSION).exists():
    cosmic_ray("cli", "init", "--force", CONFIG, "build/all.sqlite")
    draw(flags.places, flags.seed)
  cosmic_ray("cli", "exec", CONFIG, SESSION)
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


def draw(places: int, seed: int) -> None:
  """Keeps one mutant in each of some places, in random order."""
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


def stages(module: pathlib.Path) -> list[list[str]]:
  """Returns pytest's arguments, the likeliest to fail first, all tests last."""
  folder = pathlib.Path("tests", *module.parts[1:2])
  own = sorted(map(str, folder.rglob(f"test_{module.stem}*.py")))
  inside = [str(folder)] if folder.is_dir() else []
  # A linter's taste is no behaviour.
  everything = ["-n", "2", "--ignore=tests/contracts/test_lint.py"]
  return [stage for stage in (own, inside, everything) if stage]


def passes(arguments: list[str]) -> bool:
  """Runs tests up to the first that fails; a stage without tests passes."""
  command = [sys.executable, "-m", "pytest", "-x", "-q", *arguments]
  return subprocess.run(command).returncode in (0, 5)


if __name__ == "__main__":
  main()
