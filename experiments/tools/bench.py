"""Measures how fast parts of the system run on this machine.

  python -m experiments.tools.bench round --workdir=runs/bench
  python -m experiments.tools.bench codecs --workdir=runs/bench --repeats=21
  python -m experiments.tools.bench inner --workdir=runs/bench --config=...
  python -m experiments.tools.bench peers --workdir=runs/bench

A bench is a benchmark with a name. `round`, `codecs` and `peers` compare the
times of programs. The speed of a machine changes over time, so the programs run
in turn many times, and the bench reports medians of the ratios of neighbouring
times. `inner` reports tokens a second, utilisation and memory of inner steps of
the config --config; no other bench reads the config. `peers` compares rounds
with PyTorch's, which has to be installed (`make bench-peers`). Results go to
WORKDIR/bench_NAME.json and to the terminal.
"""

import sys

from absl import flags

from experiments.runtime import command_line

BENCHES = ("round", "codecs", "inner", "peers")


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
  if command_line.is_config_given() and values.bench != "inner":
    raise command_line.UsageError(
      f"the bench {values.bench} reads no config: leave out --config"
    )
  workdir = command_line.writable(values.workdir, "bench")
  from experiments.runtime import distributed_flags, running

  if values.bench == "inner":
    config = command_line.run_config(values.config)
    from experiments.tools.benchmarks import inner

    is_mesh = config.mesh.layout == "mesh"
    running.set_up_jax(distributed_flags.num_devices(config) if is_mesh else 1)
    with command_line.usage_errors():
      inner.run_inner(config, workdir, values.repeats)
    return
  running.set_up_jax()
  from experiments.tools.benchmarks import codecs, peers, ratios, round

  made = {
    "round": round.round_ratios,
    "codecs": codecs.codec_ratios,
    "peers": peers.peer_ratios,
  }
  with command_line.usage_errors():
    compared = made[values.bench]()
  ratios.run_ratios(values.bench, compared, workdir, values.repeats)


if __name__ == "__main__":
  # `bench round` is turned into `bench --bench=round`. The flag refuses unknown
  # names.
  if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
    sys.argv[1] = f"--bench={sys.argv[1]}"
  command_line.main(main, define_flags)
