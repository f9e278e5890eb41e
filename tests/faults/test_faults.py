"""Runs that are broken on purpose, as a seed says, and what survives it."""

import random

import pytest

from experiments import faults
from experiments.breakage.kinds import FAULTS
from experiments.breakage.run import (
  TOTAL_STEPS,
  NotPossibleError,
  NotSurvivedError,
  Run,
  write_text,
)

# Those that need no start beside the one that goes on, nor a second process.
QUICK = ["kill -9", "SIGTERM", "SIGINT", "a second signal"]
QUICK += [name for name in FAULTS if "checkpoint" in name]


@pytest.fixture(scope="module", name="whole")
def whole_fixture(tmp_path_factory):
  """The folder with the text, and what a run without a fault writes."""
  folder = tmp_path_factory.mktemp("faults")
  write_text(folder / "text")
  return folder, faults.undisturbed_runs(folder, ("dilocox",))


def broken(folder, number, name, moment, draw):
  return Run(
    "dilocox", folder / f"{number} {name}", folder / "text", moment, draw
  )


@pytest.mark.parametrize("number", range(5))
def test_a_seeded_fault_is_survived(whole, number):
  folder, undisturbed = whole
  found = list(faults.drawn(1, 5, QUICK))
  name, _, moment, draw = found[number]
  run = broken(folder, number, name, moment, draw)
  faults.survive(name, run, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(50))
def test_each_of_fifty_faults_is_survived(whole, number):
  folder, undisturbed = whole
  name, _, moment, draw = list(faults.drawn(0, 50, list(FAULTS)))[number]
  run = broken(folder, number, name, moment, draw)
  if "peer" in name and ("dilocox", 2) not in undisturbed:
    two = Run("dilocox", folder / "two", folder / "text", processes=2)
    faults.end(two.start(), 0)
    undisturbed["dilocox", 2] = two.metrics()
  try:
    faults.survive(name, run, undisturbed)
  except NotPossibleError as error:
    pytest.skip(str(error))


@pytest.mark.slow
def test_a_run_that_loses_something_has_not_survived(whole, monkeypatch):
  folder, undisturbed = whole
  other = {("dilocox", 0): undisturbed["dilocox", 0] + b"{}"}
  run = broken(folder, "other", "kill -9", 3, random.Random(0))
  with pytest.raises(NotSurvivedError, match="other bytes"):
    faults.survive("kill -9", run, other)
  run = broken(folder, "late", "late", 3, random.Random(0))
  # SIGTERM saves before it ends the run, so there is a step to go on from.
  monkeypatch.setitem(
    FAULTS, "late", lambda run: FAULTS["SIGTERM"](run) + TOTAL_STEPS // 2
  )
  with pytest.raises(NotSurvivedError, match="instead of"):
    faults.survive("late", run, undisturbed)


def test_every_fault_comes_once_before_one_comes_again():
  names = [name for name, *_ in faults.drawn(3, 28, list(FAULTS))]
  assert set(names[:14]) == set(names[14:]) == set(FAULTS)
  assert list(names) == [name for name, *_ in faults.drawn(3, 28, list(FAULTS))]
  assert names != [name for name, *_ in faults.drawn(4, 28, list(FAULTS))]
