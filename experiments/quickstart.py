"""Trains three methods side by side, on the clock of a slow link.

  python -m experiments.quickstart --workdir=runs/quickstart

All see the same tokens of the same text, Python's own library, with two
replicas and Muon as inner optimizer. The losses are those of a small model. The
hours are simulated: they are those of a model with 107 billion parameters on
two clusters that are joined by 1 Gbit/s. Rounds are the shortest whose exchange
hides behind inner steps there. All three run at once, each with its share of
the cores, and take a few minutes on two. The same command again goes on where
it was stopped. Text of your own:

  python -m experiments.quickstart --workdir=runs/notes --glob='notes/**/*.txt'
"""

import importlib.util
import os
import pathlib
import sys

from absl import flags

from dilocox_jax.config import RunConfig
from dilocox_jax.metrics import work_directory
from experiments.configs import default
from experiments.configs.convergence import CLOCK_107B
from experiments.configs.overlap_loco import AVERAGE
from experiments.runtime import command_line, process_group

# With 20 steps (and with 16, the default) exchanges hide on that link. Rates
# were chosen on another seed: the best of eight for the first, of six for
# AllReduce.
METHODS = {
  "overlap_loco": {"outer.learning_rate": 1.5},
  "dilocox": {"sync.sync_interval": 20},
  "allreduce": {"inner.learning_rate": 0.0035},
}
LEARNING_RATE = 0.005  # For Muon; AdamW's default is too small for it.


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  flags.DEFINE_integer("steps", 800, "Inner steps of each run.", lower_bound=60)
  text = "Pattern of your own text files, e.g. 'notes/**/*.txt'."
  flags.DEFINE_string("glob", "", text)
  text = "Train this one alone, and compare nothing."
  flags.DEFINE_enum("method", None, METHODS, text)


def run_of(method: str, num_steps: int, pattern: str = "") -> RunConfig:
  """Returns the config of a method's run.

  Args:
    method: One of `METHODS`.
    num_steps: Inner steps of the run.
    pattern: Glob of the text files; empty for Python's own library.
  """
  values = default.get_config()
  text = {"data.source": "text_files", "data.glob": pattern}
  values.update_from_flattened_dict(
    {
      "sync.method": method,
      "total_steps": num_steps,
      "data.batch_size": 2,
      "inner.optimizer": "muon",
      "inner.learning_rate": LEARNING_RATE,
      "evaluation.interval_steps": 200,
      "checkpoint.interval_steps": 400,
      "adaptive.mode": "off",  # The plan of the timed model must be known.
      **AVERAGE,  # All keep the same average, and end at the same rate.
      **METHODS[method],
      **(text if pattern else {}),
    }
  )
  return command_line.run_config(values)


def main(values: flags.FlagValues) -> None:
  """Trains all methods at once and writes the comparison."""
  workdir = command_line.writable(values.workdir, "quickstart")
  for name in METHODS:
    command_line.check_files(run_of(name, values.steps, values.glob))
  if values.method:
    path = work_directory.check_subfolder(workdir, values.method)
    _train(values.method, values, path)
    return
  members = [_member(name, values) for name in METHODS]
  # A TPU has one process at a time.
  is_tpu = importlib.util.find_spec("libtpu")
  for group in [[each] for each in members] if is_tpu else [members]:
    process_group.run(group)
  from rich.console import Console

  from dilocox_jax import report

  page = report.side_by_side([report.load_run(workdir / n) for n in METHODS])
  page.print(Console())
  print(f"comparison: {page.write(workdir)}")


def _member(method: str, values: flags.FlagValues) -> process_group.Member:
  """Returns the process of one method, which has its share of the cores."""
  own = {"method": method, "steps": values.steps, "glob": values.glob}
  given = [f"--{k}={v}" for k, v in own.items()]
  command = sys.executable, "-m", "experiments.quickstart", *given
  environment = {
    **process_group.thread_limits(len(METHODS)),
    command_line.COMMAND_VARIABLE: command_line.own_command(),
    **os.environ,
  }
  return process_group.Member(
    list(METHODS).index(method),
    [*command, f"--workdir={values.workdir}"],
    environment,
  )


def _train(method: str, values: flags.FlagValues, path: pathlib.Path) -> None:
  """Trains one method on the clock of the slow link."""
  from dilocox_jax.api.simulation_setup import ClusterClock, Options
  from experiments.runtime import running
  from experiments.sweeps.clocks import clock_of

  config = run_of(method, values.steps, values.glob)
  clock = clock_of(CLOCK_107B)
  given = config, clock.cluster, Options(step_s=clock.step_s)
  running.train(config, path, clock=ClusterClock(*given, clock.timed(config)))


if __name__ == "__main__":
  command_line.main(main, define_flags)
