"""Measures what the outer side and the codecs cost, and the simulator's speed.

  python -m experiments.bench round --workdir=runs/bench
  python -m experiments.bench codecs --workdir=runs/bench --repeats=21
  python -m experiments.bench simulate --workdir=runs/bench

Programs that are compared run in turn, many times over, and medians of the
paired ratios are reported, since one machine's speed drifts. The simulator is
compared with nothing: its rates are absolute. Results go to
WORKDIR/bench_NAME.json and to the terminal.
"""

import importlib
import sys

from absl import flags

from experiments import command_line

BENCHES = ("round", "codecs", "simulate")


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_workdir()
  flags.DEFINE_enum("bench", "round", BENCHES, "What is measured.")
  flags.DEFINE_integer(
    "repeats", 9, "Measurements of every ratio or rate.", lower_bound=3
  )


def main(values: flags.FlagValues) -> None:
  """Runs the bench that was named first."""
  workdir = command_line.writable(values.workdir)
  if values.bench == "simulate":  # Needs no JAX, which takes long to start.
    from experiments import bench_simulate

    bench_simulate.run(workdir, values.repeats)
    return
  from experiments import ratios, running

  running.set_up_jax()
  module = importlib.import_module(f"experiments.bench_{values.bench}")
  ratios.run(values.bench, module.ratios(), workdir, values.repeats)


if __name__ == "__main__":
  if len(sys.argv) > 1 and sys.argv[1] in BENCHES:
    sys.argv[1] = f"--bench={sys.argv[1]}"
  command_line.main(main, define_flags)
