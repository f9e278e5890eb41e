r"""Computes what a run would cost on given links, without running it.

  python -m experiments.simulate --config=experiments/configs/dilocox.py \
    --cluster=1gbit --workdir=runs/simulated \
    --config.model.preset=qwen_107b --config.codec.rank=2048

Takes the config files of `train`, and a cluster: a preset (--cluster=help
lists them) or a JSON file such as experiments/clusters/example.json. Two
independent paths are run: formulas over the whole run, and an event engine
over its first steps. The page says how far they agree. With --run=RUNDIR the
recorded rounds and bytes of a finished run are timed instead.
"""

from absl import flags

from experiments.runtime import command_line, own_parts


def define_flags() -> None:
  """Defines the flags of this binary."""
  from dilocox_jax.plan.pipeline.orders import PIPELINES

  command_line.define_config()
  command_line.define_workdir()
  flags.DEFINE_string(
    "cluster", "1gbit", "Preset or JSON file; 'help' lists the presets."
  )
  flags.DEFINE_string(
    "run", None, "A run directory instead of --config, to time a finished run."
  )
  own_parts.define_parts()
  flags.DEFINE_float(
    "step_s",
    None,
    "Seconds of an inner step; by default its operations over what the "
    "cluster's devices achieve.",
    lower_bound=0.0,
  )
  flags.DEFINE_float(
    "codec_s",
    0.0,
    "Seconds on the devices to encode and decode one exchange.",
    lower_bound=0.0,
  )
  flags.DEFINE_enum(
    "transport",
    "tcp",
    ("tcp", "ideal", "gloo"),
    "tcp: a round trip a message, and slow start; ideal: half a round trip; "
    "gloo: as tcp, and two replicas gather by turns.",
  )
  flags.DEFINE_integer(
    "engine_steps",
    0,
    "Inner steps that the event engine simulates; 0: six rounds.",
    lower_bound=0,
  )
  flags.DEFINE_enum(
    "pipeline",
    "none",
    ("none", *PIPELINES),
    "Pipeline schedule inside a replica; none: that of the config.",
  )
  for name, text in (
    ("stages", "Pipeline stages."),
    ("micro_batches", "Micro-batches of a step."),
    ("chunks", "Chunks of a stage (interleaved)."),
  ):
    flags.DEFINE_integer(name, 1, text, lower_bound=1)


def main(values: flags.FlagValues) -> None:
  """Simulates and prints the costs."""
  from dilocox_jax.api.simulation_setup import Options
  from experiments.simulation import cluster_list, page, run

  if values.cluster == "help":
    cluster_list.print_clusters()
    return
  own_parts.register_parts(values.parts)
  with command_line.usage_errors(kinds=(ValueError, OSError)):
    options = Options(
      values.step_s,
      values.codec_s,
      values.transport,
      values.engine_steps,
      _pipeline(values),
    )
    if values.run:
      _refuse_beside_run(values)
      timed, cluster = run.time_run(values.run, values.cluster, options)
      workdir = command_line.writable(values.workdir, "simulate")
      run.report_recorded(timed, cluster, workdir)
      return
    config = command_line.run_config(values.config)
    simulated = page.prepare(config, values.cluster, options)
  page.report_simulation(
    simulated, command_line.writable(values.workdir, "simulate")
  )


def _refuse_beside_run(values: flags.FlagValues) -> None:
  """Refuses flags that say what the finished run itself says."""
  without = ("engine_steps", False, "to simulate a config, without --run")
  command_line.refuse_unused(values, [without])
  if command_line.is_config_given():
    raise command_line.UsageError(
      "--run times a run with its own config: leave out --config"
    )


def _pipeline(values: flags.FlagValues):
  """Returns the pipeline that the flags ask for; None: that of the config."""
  from dilocox_jax.plan.pipeline.timeline import Pipeline

  is_given, needed = values.pipeline != "none", "--pipeline, e.g. =1f1b"
  names = ("stages", "micro_batches", "chunks")
  command_line.refuse_unused(
    values,
    [
      ("pipeline", values.step_s is None, "steps without --step_s"),
      *((name, is_given, needed) for name in names),
    ],
  )
  if not is_given:
    return None
  return Pipeline(
    values.pipeline, values.stages, values.micro_batches, values.chunks
  )


if __name__ == "__main__":
  command_line.main(main, define_flags)
