"""Lets Spin search the model of the mailbox's protocol completely.

  python -m tests.protocol_model.check [--only=NAME ...]

Spin visits every state that the processes of a model can reach. For each model
the program prints the number of states, the seconds and the memory. Then it
puts one fault after the other into the protocol. Spin has to find an error with
each of them, since otherwise the model could not show that the protocol works
because of its rules. docs/how_it_works/mailbox_model.md says what the searches
showed.

Needs Spin and a C compiler; Python's standard library is enough beside them.
"""

import argparse
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = pathlib.Path(__file__).with_name("mailbox.pml")
BUILD = ROOT / "build" / "model"
MAX_MB = 4096
# Deeper than any path of these models. Spin says so if a path is longer.
MAX_DEPTH = 100_000
# Programs and the packages of Debian that they come in.
PROGRAMS = {"spin": "spin", "cc": "gcc"}


class Model(NamedTuple):
  """A variant of the model.

  Attributes:
    name: Its name.
    macros: The macros that are defined, as `NAME` or `NAME=VALUE`. They are
      explained in mailbox.pml.
    searches_cycles: Whether Spin also searches for runs that never end. That
      takes twice as many states.
  """

  name: str
  macros: tuple[str, ...]
  searches_cycles: bool = False


class Fault(NamedTuple):
  """A fault in the protocol that Spin has to find.

  Attributes:
    macro: The macro that puts the fault into the model.
    model: Name of the model in which Spin finds it.
  """

  macro: str
  model: str


class Search(NamedTuple):
  """What a search of Spin printed.

  Attributes:
    has_error: Whether Spin found an error.
    is_complete: Whether Spin visited all states. A search ends at the first
      error, and then it is not complete.
    num_states: Number of states that were stored.
    memory_mb: Memory in MB.
    error: The first error, or why the search is not complete; else "".
  """

  has_error: bool
  is_complete: bool
  num_states: int
  memory_mb: float
  error: str


MODELS = (
  Model("plain", ("N=3", "E=3"), searches_cycles=True),
  Model("kill", ("N=3", "E=3", "KILL")),
  Model("late_writes", ("N=3", "E=3", "KILL", "LATE_WRITES")),
  Model("lost_message", ("N=3", "E=3", "MESSAGES_LOST")),
  Model("lost_list", ("N=3", "E=3", "LISTS_LOST")),
  Model(
    "kill_and_loss",
    ("N=3", "E=2", "KILL", "MESSAGES_LOST", "LISTS_LOST"),
  ),
  Model("snapshot", ("N=3", "E=3", "SNAPSHOTS", "ONE_SNAPSHOT")),
  Model("two_snapshots", ("N=2", "E=3", "QUORUM=1", "SNAPSHOTS")),
  Model(
    "snapshots_and_kill",
    ("N=2", "E=3", "SNAPSHOTS", "KILL"),
    searches_cycles=True,
  ),
  Model(
    "lost_snapshot",
    (
      "N=2",
      "E=3",
      "QUORUM=1",
      "KEPT=2",
      "SNAPSHOTS",
      "MARKS_LOST",
      "SNAPSHOTS_LOST",
    ),
    searches_cycles=True,
  ),
  Model(
    "step_by_step",
    (
      "N=2",
      "E=2",
      "QUORUM=1",
      "READS_ONE_BY_ONE",
      "SNAPSHOTS",
      "MESSAGES_LOST",
      "LISTS_LOST",
      "MARKS_LOST",
    ),
    searches_cycles=True,
  ),
)
FAULTS = (
  Fault("NO_REPEAT_CHECK", "kill"),
  Fault("WAIT_FOR_ALL", "kill"),
  Fault("NO_PROPOSAL", "lost_list"),
  Fault("NO_RESTORE", "lost_message"),
  Fault("KEEP_OTHER_MESSAGE", "kill_and_loss"),
  Fault("NO_DELETION_MARK", "step_by_step"),
  Fault("MARK_AFTER_DELETION", "step_by_step"),
  Fault("NO_CHECK_AFTER_MANIFEST", "step_by_step"),
  Fault("NO_CHECK_BEFORE_DECISION", "step_by_step"),
  Fault("ONE_MARK", "step_by_step"),
  Fault("NO_SECOND_LOOK", "two_snapshots"),
)


def main() -> None:
  """Runs all searches. Ends with 1 if one of them is not as it should be."""
  parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
  parser.add_argument(
    "--only",
    action="append",
    metavar="NAME",
    help="run this model or fault only; may be given again",
  )
  flags = parser.parse_args()
  missing = missing_program()
  if missing is not None:
    print(f"error: {missing}", file=sys.stderr)
    sys.exit(2)
  unknown = set(flags.only or ()) - set(names())
  if unknown:
    known = ", ".join(names())
    print(
      f"error: there is no model or fault {min(unknown)}: take one of {known}",
      file=sys.stderr,
    )
    sys.exit(2)
  start = time.monotonic()
  failed = run_all(flags.only or names())
  minutes = (time.monotonic() - start) / 60
  if failed:
    print(f"error: not as it should be: {', '.join(failed)}", file=sys.stderr)
    sys.exit(1)
  print(f"all searches are as they should be ({minutes:.1f} minutes)")


def names() -> list[str]:
  """Returns the names of all models and faults."""
  return [model.name for model in MODELS] + [fault.macro for fault in FAULTS]


def missing_program() -> str | None:
  """Returns a line about the first program that is missing, or None."""
  for program, package in PROGRAMS.items():
    if shutil.which(program) is None:
      return (
        f"{program} is missing, which checks the model of the protocol; on"
        f" Debian: apt install {package}"
      )
  return None


def run_all(wanted: Sequence[str]) -> list[str]:
  """Runs models, then faults. Returns the names of those that went wrong.

  Args:
    wanted: Names of the models and faults to run.
  """
  failed = []
  print(
    f"{'model':<24} {'states':>10} {'seconds':>8} {'CPU s':>7} {'MB':>6}",
    flush=True,
  )
  for model in MODELS:
    if model.name not in wanted:
      continue
    search = run_and_print(model, model.name)
    if search.has_error or not search.is_complete:
      failed.append(model.name)
      print(f"  {search.error}; to see how: {replay_command(model)}")
  for fault in FAULTS:
    if fault.macro not in wanted:
      continue
    model = faulty_model(fault)
    search = run_and_print(model, f"{fault.macro} (fault)")
    if search.has_error:
      print(f"  found: {search.error}")
    else:
      failed.append(fault.macro)
      print(f"  Spin finds no error: {search.error or 'all states are right'}")
  return failed


def faulty_model(fault: Fault) -> Model:
  """Returns the model in which Spin has to find a fault."""
  model = next(model for model in MODELS if model.name == fault.model)
  return Model(
    name=fault.macro,
    macros=(*model.macros, fault.macro),
    searches_cycles=model.searches_cycles,
  )


def run_and_print(model: Model, title: str) -> Search:
  """Searches a model, and prints a line of figures."""
  start = time.monotonic()
  cpu_before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
  search = run_search(model)
  cpu_after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
  seconds = time.monotonic() - start
  print(
    f"{title:<24} {search.num_states:>10} {seconds:>8.1f}"
    f" {cpu_after - cpu_before:>7.1f} {search.memory_mb:>6.0f}",
    flush=True,
  )
  return search


def run_search(model: Model) -> Search:
  """Makes a program of a model in its folder of `BUILD`, and runs it."""
  folder = BUILD / model.name
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir(parents=True)
  macros = [f"-D{macro}" for macro in model.macros]
  run(["spin", *macros, "-a", str(SOURCE)], folder)
  # Without cycles, Spin needs less memory for each state.
  kind = "-DNP" if model.searches_cycles else "-DSAFETY"
  flags = ["-O1", "-w", kind, "-DCOLLAPSE", f"-DMEMLIM={MAX_MB}"]
  run(["cc", *flags, "-o", "pan", "pan.c"], folder)
  # -E: the process `observer` says which states must not be the last one.
  options = [f"-m{MAX_DEPTH}", "-n", "-E"]
  if model.searches_cycles:
    options.append("-l")
  return parsed_search(run(["./pan", *options], folder, may_fail=True))


def run(
  command: Sequence[str], folder: pathlib.Path, may_fail: bool = False
) -> str:
  """Runs a command in a folder, and returns what it printed.

  Args:
    command: The program and its arguments.
    folder: The folder in which it runs.
    may_fail: Whether the command may fail: what it printed then says why.

  Raises:
    RuntimeError: If the command failed.
  """
  ended = subprocess.run(
    command,
    cwd=folder,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  if ended.returncode and not may_fail:
    raise RuntimeError(f"{' '.join(command)} failed:\n{ended.stdout}")
  return ended.stdout


def parsed_search(text: str) -> Search:
  """Returns the result of a search.

  Args:
    text: What the program that Spin has made printed.
  """
  num_errors = re.search(r"errors: (\d+)", text)
  num_states = re.search(r"(\S+) states, stored", text)
  memory = re.search(r"(\S+)\s+total actual memory usage", text)
  error = re.search(r"^pan:\d+: (.*)", text, re.MULTILINE)
  is_complete = num_errors is not None
  for sign in ("Search not completed", "max search depth too small"):
    if sign in text:
      is_complete = False
  reason = ""
  if error:
    reason = error[1]
  elif not is_complete:
    reason = "the search is not complete"
  return Search(
    has_error=num_errors is not None and int(num_errors[1]) > 0,
    is_complete=is_complete,
    num_states=int(float(num_states[1])) if num_states else 0,
    memory_mb=float(memory[1]) if memory else 0.0,
    error=reason,
  )


def replay_command(model: Model) -> str:
  """Returns the command that shows the way to an error, step by step."""
  macros = " ".join(f"-D{macro}" for macro in model.macros)
  source = SOURCE.relative_to(ROOT)
  trail = (BUILD / model.name / f"{SOURCE.name}.trail").relative_to(ROOT)
  return f"spin -t -p -k {trail} {macros} {source}"


if __name__ == "__main__":
  main()
