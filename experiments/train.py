"""Trains one run: a config file, a work directory, and nothing else.

  python -m experiments.train --config=experiments/configs/dilocox.py
  --workdir=runs/dilocox --config.sync.sync_interval=50

The same command again continues a run that was interrupted. The directory
explains itself: config, versions, metrics.jsonl, TensorBoard events, figures
and report.md.
"""

from absl import flags

from experiments import command_line


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_config()
  command_line.define_workdir()
  flags.DEFINE_bool(
    "profile", False, "Write a jax.profiler trace to WORKDIR/profile."
  )


def main(values: flags.FlagValues) -> None:
  """Trains and prints where the report is."""
  config = command_line.run_config(values.config)
  workdir = command_line.writable(values.workdir)
  from experiments import running  # Loads JAX: nothing bad waits for it.

  running.train(config, workdir, profile=values.profile)


if __name__ == "__main__":
  command_line.main(main, define_flags)
