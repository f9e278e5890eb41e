"""Measures what the outer side costs, as ratios within one process.

  python -m experiments.bench round --workdir=runs/bench

Programs that are compared run in turn, many times over, and medians of the
paired ratios are reported, since one machine's speed drifts. Results go to
WORKDIR/bench_round.json and to the terminal.
"""

import sys

from absl import flags

from experiments import command_line

BENCHES = ("round",)


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  flags.DEFINE_integer(
    "repeats", 9, "Paired measurements of every ratio.", lower_bound=3
  )


def main(values: flags.FlagValues) -> None:
  """Runs the bench that the first argument names."""
  workdir = command_line.writable(values.workdir)
  from experiments import bench_round

  bench_round.run(workdir, values.repeats)


if __name__ == "__main__":
  if len(sys.argv) > 1 and sys.argv[1] in BENCHES:
    del sys.argv[1]
  command_line.main(main, define_flags)
