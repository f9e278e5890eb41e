"""The loop of both sweep binaries, with a maker that makes nothing."""

import os
import pathlib
import signal

import pytest

from experiments.runtime import command_line, job_pool
from experiments.sweeps import sweep_loop

JOB = job_pool.Job("b", pathlib.Path("b"), pathlib.Path("b.log"), (), 1)


class Maker:
  """Notes what it is asked for; some runs fail, some come too late."""

  def __init__(self, fails="", late=""):
    self.made, self.failures, self._fails, self._late = [], [], fails, late

  def to_do(self, runs):
    return f"{len(runs)} to do"

  def make(self, runs, processes, deadline_s):
    self.made += runs
    if self._fails in runs:
      self.failures.append((JOB, "too hot"))
    return self._late in runs


def swept(maker, tasks, **options):
  """The reports written, and the error or `NO_ERROR`."""
  reports = []
  try:
    sweep_loop.run_sweep(
      maker,
      [(name, list(name), reasons) for name, reasons in tasks],
      lambda: reports.append(tuple(maker.made)),
      **{"processes": 1, **options},
    )
  except command_line.StoppedError as error:
    return reports, error
  return reports, NO_ERROR


NO_ERROR = command_line.StoppedError("none", 0)
TASKS = [("ab", ()), ("cd", ())]


def test_all_tasks_are_made_in_order_and_then_reported(capsys):
  assert swept(Maker(), TASKS) == ([("a", "b", "c", "d")], NO_ERROR)
  assert capsys.readouterr().out.splitlines() == [
    "ab: 2 runs, 2 to do",
    "cd: 2 runs, 2 to do",
  ]


@pytest.mark.parametrize("config_file", ["a/b.py", "a/b.py:chinchilla,2"])
def test_an_argument_of_a_config_is_no_part_of_its_path(config_file):
  assert sweep_loop.path_of(config_file) == "a/b.py"


def test_a_failure_ends_its_task_and_no_other_begins():
  reports, error = swept(Maker(fails="a"), TASKS)
  assert reports == [("a", "b")] and error.exit_code == 1
  text = "1 of 2 runs failed, first b: too hot (log: b.log)"
  assert str(error) == text


def test_when_the_time_is_over_the_command_is_to_be_tried_again():
  reports, error = swept(Maker(late="a"), TASKS, max_minutes=2)
  assert reports == [("a", "b")]
  assert error.exit_code == command_line.TRY_AGAIN
  assert "--max_minutes=2 are over" in str(error)


def test_what_could_not_be_listed_is_told_once_and_at_the_end():
  tasks = [("a", ["no x"]), ("b", ["no x", "no y"]), ("c", [])]
  reports, error = swept(Maker(), tasks)
  assert reports == [("a", "b", "c")] and str(error) == "no x; no y"


def test_without_training_runs_are_counted_and_nothing_is_an_error(capsys):
  maker = Maker(fails="a")
  assert swept(maker, [("ab", ["no x"])], trains=False) == ([()], NO_ERROR)
  assert maker.made == [] and "ab: 2 runs" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_sweep_with_what_to_do(number):
  class Interrupted(Maker):
    def make(self, runs, processes, deadline_s):
      os.kill(os.getpid(), number)
      raise AssertionError("the signal was not heard")

  # A shell's background jobs ignore Ctrl-C, and then so does this process.
  before = signal.getsignal(number)
  if number == signal.SIGINT:
    signal.signal(number, signal.default_int_handler)
  try:
    reports, error = swept(Interrupted(), TASKS)
  finally:
    signal.signal(number, before)
  assert reports == [] and error.exit_code == command_line.INTERRUPTED
  assert "the same command goes on from here" in str(error)
