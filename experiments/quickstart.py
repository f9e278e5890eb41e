"""Trains three methods side by side, with simulated hours on a slow link.

  python -m experiments.quickstart --workdir=runs/quickstart

Each method trains a small model with two replicas, on the same tokens of
Python's own library. The losses are those of the small model. The hours are
simulated for another model: 107 billion parameters on two clusters that are
joined by 1 Gbit/s. The methods train at once, which takes a few minutes on two
cores. If libtpu is installed, they train one after the other. If the program
was stopped, the same command goes on. Text of your own:

  python -m experiments.quickstart --workdir=runs/notes --glob='notes/**/*.txt'
"""

import importlib.util
import os
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from dilocox_jax.config import RunConfig
from dilocox_jax.metrics import work_directory
from experiments.configs.convergence import CLOCK_107B
from experiments.configs.quickstart import METHODS, get_config
from experiments.runtime import (
  command_line,
  process_group,
  run_configs,
  workdir_flag,
)

flags.adopt_module_key_flags(workdir_flag)
_STEPS = flags.DEFINE_integer(
  "steps", 800, "Inner steps of each run.", lower_bound=60
)
_GLOB = flags.DEFINE_string(
  "glob", "", "Pattern of your own text files, e.g. 'notes/**/*.txt'."
)
_METHOD = flags.DEFINE_enum(
  "method", None, METHODS, "Train this one alone, and compare nothing."
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Trains all methods, and writes the comparison.

  With --method only this method is trained, and nothing is compared.
  """
  command_line.refuse_arguments(argv)
  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "quickstart")
  for method in METHODS:
    run_configs.check_files(_run_config(method))
  if _METHOD.value:
    run_directory = work_directory.check_subfolder(workdir, _METHOD.value)
    _train(_METHOD.value, run_directory)
    return
  _train_all()
  from rich.console import Console

  from dilocox_jax import report

  runs = [report.load_run(workdir / method) for method in METHODS]
  page = report.side_by_side(runs)
  page.print(Console())
  print(f"comparison: {page.write(workdir)}")


def _run_config(method: str) -> RunConfig:
  """Returns the checked config of a method's run."""
  values = get_config(method, num_steps=_STEPS.value, pattern=_GLOB.value)
  return run_configs.run_config(values)


def _train_all() -> None:
  """Trains every method in its own process.

  The processes run at once, or if libtpu is installed, one after the other.
  """
  members = [
    process_group.Member(number, _command(method), _environment())
    for number, method in enumerate(METHODS)
  ]
  if not importlib.util.find_spec("libtpu"):
    process_group.run(members)
    return
  # Only one process at a time can use a TPU.
  for member in members:
    process_group.run([member])


def _command(method: str) -> list[str]:
  """Returns the command line that trains one method."""
  return [
    sys.executable,
    "-m",
    "experiments.quickstart",
    f"--method={method}",
    f"--steps={_STEPS.value}",
    f"--glob={_GLOB.value}",
    f"--workdir={workdir_flag.WORKDIR.value}",
  ]


def _environment() -> dict[str, str]:
  """Returns the environment of a process that trains one method.

  The process gets its share of the cores, unless the user's environment sets
  the numbers of threads.
  """
  return {
    **process_group.thread_limits(len(METHODS)),
    command_line.COMMAND_VARIABLE: command_line.typed_command(),
    **os.environ,
  }


def _train(method: str, run_directory: pathlib.Path) -> None:
  """Trains one method, and adds up the simulated time on the slow link."""
  from dilocox_jax.api.simulation_setup import ClusterClock, Options
  from experiments.runtime import running
  from experiments.sweeps.clocks import clock_of

  config = _run_config(method)
  sweep_clock = clock_of(CLOCK_107B)
  clock = ClusterClock(
    config,
    sweep_clock.cluster,
    Options(step_s=sweep_clock.step_s),
    timed=sweep_clock.timed(config),
  )
  running.train(config, run_directory, clock=clock)


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
