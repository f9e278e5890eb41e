"""Measures what parts of the system cost, and draws pipeline schedules.

  python -m experiments.bench round --workdir=runs/bench
  python -m experiments.bench codecs --workdir=runs/bench --repeats=21
  python -m experiments.bench inner --workdir=runs/bench --config=...
  python -m experiments.bench simulate --workdir=runs/bench
  python -m experiments.bench pipeline --workdir=runs/bench --micro_batches=16

`round` and `codecs` compare programs: these run in turn, many times over, and
medians of the paired ratios are reported, since one machine's speed drifts.
`inner` (inner steps of --config, which no other bench reads) and `simulate`
report absolute rates. `pipeline` measures nothing: its numbers are derived.
Results go to WORKDIR/bench_NAME.json and to the terminal.
"""

import pathlib
import sys

from absl import flags

from dilocox_jax.plan.pipeline.orders import PIPELINES
from experiments.runtime import command_line

BENCHES = ("round", "codecs", "inner", "simulate", "pipeline")


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_config()
  command_line.define_workdir()
  flags.DEFINE_enum("bench", "round", BENCHES, "What is measured.")
  flags.DEFINE_integer(
    "repeats", 9, "Measurements of every ratio or rate.", lower_bound=3
  )
  _define_pipeline_flags()


def _define_pipeline_flags() -> None:
  flags.DEFINE_multi_enum(
    "schedule",
    PIPELINES,
    PIPELINES,
    "Pipeline schedules to draw; give it several times for several.",
  )
  for name, default, text in (
    ("stages", 4, "Stages of a pipeline."),
    ("micro_batches", 8, "Micro-batches of a step."),
    ("chunks", 2, "Model chunks of a stage, for interleaved."),
  ):
    flags.DEFINE_integer(name, default, text, lower_bound=1)


def main(values: flags.FlagValues) -> None:
  """Runs one bench."""
  workdir = command_line.writable(values.workdir)
  if values.bench == "simulate":  # Without JAX, which takes long to start.
    from experiments.benchmarks import simulate

    simulate.run_rates(workdir, values.repeats)
    return
  if values.bench == "pipeline":
    from experiments.benchmarks import pipeline

    sizes = values.stages, values.micro_batches, values.chunks
    pipeline.run_schedules(workdir, values.schedule, *sizes)
    return
  if values.bench == "inner":
    _inner(values, workdir)
    return
  from experiments.benchmarks import codecs, ratios, round
  from experiments.runtime import running

  running.set_up_jax()
  is_round = values.bench == "round"
  compared = round.round_ratios() if is_round else codecs.codec_ratios()
  ratios.run_ratios(values.bench, compared, workdir, values.repeats)


def _inner(values: flags.FlagValues, workdir: pathlib.Path) -> None:
  config = command_line.run_config(values.config)
  from experiments.benchmarks import inner
  from experiments.runtime import distributed_flags, running

  is_mesh = config.mesh.layout == "mesh"
  running.set_up_jax(distributed_flags.num_devices(config) if is_mesh else 1)
  try:
    inner.run_inner(config, workdir, values.repeats)
  except ValueError as error:
    raise command_line.UsageError(error) from error


if __name__ == "__main__":
  # `bench round` is `bench --bench=round`: the flag knows which names exist.
  if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
    sys.argv[1] = f"--bench={sys.argv[1]}"
  command_line.main(main, define_flags)
