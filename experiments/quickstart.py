"""Trains three methods side by side, on the clock of a slow link.

  python -m experiments.quickstart --workdir=runs/quickstart

All see the same tokens of the same text, Python's own library, with two
replicas and Muon as inner optimizer. The losses are those of a small model. The
hours are simulated: they are those of a model with 107 billion parameters on
two clusters that are joined by 1 Gbit/s. H of the methods that hide their
exchange follows from that link. It takes a few minutes on two CPU cores. The
same command again goes on where it was stopped. Text of your own:

  python -m experiments.quickstart --workdir=runs/notes --glob='notes/**/*.txt'
"""

from absl import flags
from rich.console import Console

from dilocox_jax.api.simulation_setup import ClusterClock, Options
from dilocox_jax.config import RunConfig
from experiments.configs import default
from experiments.configs.convergence import CLOCK_107B
from experiments.configs.overlap_loco import AVERAGE
from experiments.runtime import command_line
from experiments.sweeps.clocks import SweepClock, clock_of, rounds_from

METHODS = ("overlap_loco", "dilocox", "allreduce")
LEARNING_RATE = 0.005  # For Muon; AdamW's default is too small for it.


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  flags.DEFINE_integer("steps", 640, "Inner steps of each run.", lower_bound=60)
  text = "Pattern of your own text files, e.g. 'notes/**/*.txt'."
  flags.DEFINE_string("glob", "", text)


def run_of(
  method: str, num_steps: int, clock: SweepClock, pattern: str = ""
) -> RunConfig:
  """Returns the config of a method's run.

  Args:
    method: One of `METHODS`.
    num_steps: Inner steps of the run.
    clock: The clock from whose link the rounds of a delayed method follow.
    pattern: Glob of the text files; empty for Python's own library.
  """
  values = default.get_config()
  text = {"data.source": "text_files", "data.glob": pattern}
  values.update_from_flattened_dict(
    {
      "sync.method": method,
      "total_steps": num_steps,
      "data.batch_size": 4,
      "inner.optimizer": "muon",
      "inner.learning_rate": LEARNING_RATE,
      "adaptive.mode": "off",  # The plan of the timed model must be known.
      **(AVERAGE if method == "overlap_loco" else {}),
      **(text if pattern else {}),
    }
  )
  config = command_line.run_config(values)
  if config.sync.named.schedule.overlap_steps:
    rounds = rounds_from(clock, config)
    values.update_from_flattened_dict(rounds)
  return command_line.run_config(values)


def main(values: flags.FlagValues) -> None:
  """Trains all methods and writes the comparison."""
  workdir = command_line.writable(values.workdir, "quickstart")
  from dilocox_jax import report
  from experiments.runtime import running

  clock = clock_of(CLOCK_107B)
  paths = [workdir / name for name in METHODS]
  for name, path in zip(METHODS, paths, strict=True):
    config = run_of(name, values.steps, clock, values.glob)
    command_line.check_files(config)
    options = Options(step_s=clock.step_s)
    timed = clock.timed(config)
    simulated = ClusterClock(config, clock.cluster, options, timed)
    running.train(config, path, clock=simulated)
  page = report.side_by_side([report.load_run(path) for path in paths])
  page.print(Console())
  print(f"comparison: {page.write(workdir)}")


if __name__ == "__main__":
  command_line.main(main, define_flags)
