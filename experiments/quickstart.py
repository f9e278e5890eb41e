"""Trains DiLoCoX and AllReduce side by side and compares them.

  python -m experiments.quickstart --workdir=runs/quickstart

Both see the same number of tokens of the same text, Python's own library,
with two replicas. It takes a few minutes on two CPU cores. The same command
again goes on where it was stopped.
"""

import importlib

from absl import flags
from rich.console import Console

from experiments.runtime import command_line

METHODS = ("dilocox", "allreduce")


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  flags.DEFINE_integer("steps", 450, "Inner steps of each run.", lower_bound=60)


def main(values: flags.FlagValues) -> None:
  """Trains both methods and writes the comparison."""
  workdir = command_line.writable(values.workdir)
  from dilocox_jax import report
  from experiments.runtime import running

  paths = [workdir / name for name in METHODS]
  for name, path in zip(METHODS, paths, strict=True):
    module = importlib.import_module(f"experiments.configs.{name}")
    config = module.get_config()
    config.total_steps = values.steps
    running.train(command_line.run_config(config), path)
  page = report.compare(paths, workdir)
  report.print_table([report.load_run(path) for path in paths], Console())
  print(f"comparison: {page}")


if __name__ == "__main__":
  command_line.main(main, define_flags)
