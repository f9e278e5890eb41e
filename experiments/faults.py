"""Breaks runs on purpose, in every way that the list below knows, and resumes.

  python -m experiments.faults --workdir=runs/faults --num_faults=50 --seed=0

A seed draws the faults and their moments. Each is one run of a small model in
processes of its own: the fault comes, the run ends, what was broken is mended,
and the same command goes on. It survives if it says in one line what happened,
loses no more than what came after the last save, ends with the same bytes of
metrics as a run that nobody disturbed, and leaves nothing behind. The exit code
is 1 if one does not.
"""

import pathlib
import random
import shutil
from collections.abc import Iterator

from absl import flags

from experiments.breakage.kinds import FAULTS
from experiments.breakage.run import (
  ROUND_STEPS,
  TOTAL_STEPS,
  NotPossibleError,
  NotSurvivedError,
  Run,
  check,
  end,
  write_text,
)
from experiments.runtime import command_line

_METHODS = ("diloco", "dilocox")


def survive(
  name: str, run: Run, undisturbed: dict[tuple[str, int], bytes]
) -> None:
  """Lets one fault happen and resumes the run.

  Args:
    name: Name of the fault.
    run: Run that has not begun.
    undisturbed: Bytes of the metrics of runs without the fault, by method and
      number of processes.

  Raises:
    NotSurvivedError: If it cost more than it may.
    NotPossibleError: If it cannot be made here.
  """
  step = FAULTS[name](run)
  errors = end(run.start(), 0)
  if 0 < step < TOTAL_STEPS:
    said = [x for x in errors.splitlines() if "continuing at step" in x]
    check(said, "it began anew")
    found = int(said[-1].partition("step ")[2].split()[0])
    check(found >= step, f"it went on from {found} instead of {step}")
  wanted = undisturbed[run.method, run.processes]
  check(run.metrics() == wanted, "it ended with other bytes")
  left = list((run.workdir / "checkpoints").glob("*tmp*"))
  check(not left, f"left behind: {left}")


def undisturbed_runs(
  workdir: pathlib.Path, methods: tuple[str, ...] = _METHODS
) -> dict[tuple[str, int], bytes]:
  """Returns the metrics of runs without a fault, by method and processes.

  Args:
    workdir: Folder with the text, in which the runs get folders.
    methods: Names of their configs.
  """
  found = {}
  for processes in (0, 2) if len(methods) > 1 else (0,):
    for method in methods:
      name = f"whole_{method}_{processes}"
      run = Run(method, workdir / name, workdir / "text", processes=processes)
      end(run.start(), 0)
      found[method, processes] = run.metrics()
  return found


def drawn(
  seed: int, count: int, names: list[str]
) -> Iterator[tuple[str, str, int, random.Random]]:
  """Yields name, method, moment and random numbers of each fault.

  Every fault comes once before one comes again.
  """
  draw = random.Random(seed)
  order: list[str] = []
  for number in range(count):
    if not order:
      order = draw.sample(names, len(names))
    method = draw.choice(_METHODS)
    moment = draw.randrange(1, TOTAL_STEPS // ROUND_STEPS - 6)
    yield order.pop(), method, moment, random.Random(f"{seed}/{number}")


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  flags.DEFINE_integer("num_faults", 50, "Number of faults.", lower_bound=1)
  flags.DEFINE_integer("seed", 0, "Seed of faults and moments.", lower_bound=0)
  flags.DEFINE_string("only", "", "Part of the names of the faults to make.")


def main(values: flags.FlagValues) -> None:
  """Makes the faults in turn and prints how each ended."""
  names = [name for name in FAULTS if values.only in name]
  if not names:
    raise command_line.UsageError(f"--only={values.only!r} names no fault")
  folder = command_line.writable(values.workdir, "faults")
  write_text(folder / "text")
  whole = undisturbed_runs(folder)
  counts = {"survived": 0, "not survived": 0, "not possible here": 0}
  faults = drawn(values.seed, values.num_faults, names)
  for number, (name, method, moment, draw) in enumerate(faults):
    run = Run(method, folder / str(number), folder / "text", moment, draw)
    result, reason = "survived", ""
    try:
      survive(name, run, whole)
    except NotSurvivedError as error:
      result, reason = "not survived", f": {error}"
    except NotPossibleError as error:
      result, reason = "not possible here", f": {error}"
    counts[result] += 1
    print(
      f"{number:3} {name}, {method}, round {moment}: {result}{reason}",
      flush=True,
    )
    if result == "survived":
      shutil.rmtree(run.workdir)
  print(", ".join(f"{count} {result}" for result, count in counts.items()))
  if counts["not survived"]:
    raise SystemExit(1)


if __name__ == "__main__":
  command_line.main(main, define_flags)
