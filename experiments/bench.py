"""Measures the time of parts of the system.

  python -m experiments.bench round --workdir=runs/bench
  python -m experiments.bench codecs --workdir=runs/bench --repeats=21
  python -m experiments.bench inner --workdir=runs/bench --config=...
  python -m experiments.bench data --workdir=runs/bench
  python -m experiments.bench peers --workdir=runs/bench

A bench is a benchmark with a name. `round` and `codecs` compare the times of
programs. The speed of a machine changes over time, so the programs run in turn
many times, and the bench reports medians of the ratios of neighbouring times.
`inner` and `data` report absolute rates. `inner` measures inner steps of the
config --config, and `data` how fast batches are read beside them; no other
bench reads the config. `peers` compares rounds, codecs and checkpoints with
PyTorch's, which has to be installed (`make bench-peers`). Results go to
WORKDIR/bench_NAME.json and to the terminal.
"""

import pathlib
import sys

from absl import flags

from experiments.runtime import command_line

BENCHES = ("round", "codecs", "inner", "data", "peers")


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_config()
  command_line.define_workdir()
  flags.DEFINE_enum("bench", "round", BENCHES, "Bench to run.")
  flags.DEFINE_integer(
    "repeats", 9, "Number of measurements of each ratio or rate.", lower_bound=3
  )


def main(values: flags.FlagValues) -> None:
  """Runs the bench that the flag --bench names."""
  if command_line.is_config_given() and values.bench not in ("inner", "data"):
    raise command_line.UsageError(
      f"the bench {values.bench} reads no config: leave out --config"
    )
  workdir = command_line.writable(values.workdir, "bench")
  if values.bench in ("inner", "data"):
    _of_config(values, workdir)
    return
  from experiments.benchmarks import codecs, ratios, round
  from experiments.runtime import running

  running.set_up_jax()
  if values.bench == "peers":
    from experiments.benchmarks import peers

    with command_line.usage_errors():
      peers.run_peers(workdir, values.repeats)
    return
  is_round = values.bench == "round"
  programs = round.round_ratios() if is_round else codecs.codec_ratios()
  ratios.run_ratios(values.bench, programs, workdir, values.repeats)


def _of_config(values: flags.FlagValues, workdir: pathlib.Path) -> None:
  """Runs `inner` or `data` on the devices that the config needs."""
  config = command_line.run_config(values.config)
  from experiments.benchmarks import data, inner
  from experiments.runtime import distributed_flags, running

  is_mesh = config.mesh.layout == "mesh"
  running.set_up_jax(distributed_flags.num_devices(config) if is_mesh else 1)
  with command_line.usage_errors():
    run = inner.run_inner if values.bench == "inner" else data.run_data
    run(config, workdir, values.repeats)


if __name__ == "__main__":
  # `bench round` is turned into `bench --bench=round`. The flag refuses unknown
  # names.
  if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
    sys.argv[1] = f"--bench={sys.argv[1]}"
  command_line.main(main, define_flags)
