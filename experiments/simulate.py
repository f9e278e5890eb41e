r"""Computes what a run would cost on given links, without running it.

  python -m experiments.simulate --workdir=runs/simulated \
    --config=experiments/configs/papers.py:dilocox_107b \
    --config.data.batch_size=8 --config.inner.accumulate_steps=4 \
    --cluster=dilocox_107b --step_s=8.8

DiLoCoX of 107 billion parameters, some 400 times as fast as AllReduce (its
paper has 357). A cluster is a preset (--cluster=help) or a JSON file such as
experiments/clusters/example.json. This compares all methods, and writes configs
of those that fit into the devices:

  python -m experiments.simulate --workdir=runs/methods --methods=all \
    --config.model.preset=llama_1_1b --config.data.batch_size=256 \
    --config.data.sequence_length=1024 --cluster=200mbit --memory='80 GB'

With --run=RUNDIR the recorded rounds and bytes of a finished run are timed.
"""

import math
import shutil
import textwrap

from absl import flags

from experiments.runtime import command_line, own_parts


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_config()
  command_line.define_workdir()
  flags.DEFINE_string(
    "cluster", "1gbit", "Preset or JSON file; 'help' lists the presets."
  )
  flags.DEFINE_enum(
    "methods",
    "own",
    ("own", "all"),
    "own: that of the config; all: every method, with layouts that fit.",
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
    "nccl",
    ("nccl", "tpu", "gloo"),
    "nccl (GPUs): messages in pieces that follow one another; tpu: assumed the "
    "same; gloo (CPUs): whole messages, a round trip each.",
  )
  flags.DEFINE_string(
    "memory", None, "Memory of a device, e.g. '80 GB'; else the cluster's."
  )
  flags.DEFINE_float(
    "tokens",
    None,
    "Tokens of the runs whose configs --methods=all writes; by default 20 a "
    "parameter.",
  )


def main(values: flags.FlagValues) -> None:
  """Simulates and prints the costs."""
  from dilocox_jax.api import method_plans
  from dilocox_jax.api.simulation_setup import Options
  from dilocox_jax.checks import require
  from dilocox_jax.simulate.quantities import SIZE, parse_quantity
  from experiments.simulation import all_methods, page, run

  if values.cluster == "help":
    _print_clusters()
    return
  own_parts.register_parts(values.parts)
  is_all = values.methods == "all"
  command_line.refuse_unused(values, [("tokens", is_all, "--methods=all")])
  if values.tokens is not None and not 0 < values.tokens < math.inf:
    raise command_line.UsageError(f"--tokens={values.tokens} must be above 0")
  with command_line.usage_errors(kinds=(ValueError, OSError)):
    options = Options(values.step_s, values.codec_s, values.transport)
    if values.run:
      _refuse_beside_run(values)
      timed, cluster = run.time_run(values.run, values.cluster, options)
      workdir = command_line.writable(values.workdir, "simulate")
      run.report_recorded(timed, cluster, workdir)
      return
    memory = values.memory and parse_quantity(values.memory, SIZE, "--memory")
    require(memory is None or memory > 0, "--memory must be above 0")
    config = command_line.run_config(values.config)
    args = config, values.cluster, options, memory
    if is_all:
      found = method_plans.compare_methods(*args)
      workdir = command_line.writable(values.workdir, "simulate")
      all_methods.report_methods(*found, values.tokens, workdir)
      return
    plan = method_plans.plan_run(*args)
  page.report_plan(plan, command_line.writable(values.workdir, "simulate"))


def _print_clusters() -> None:
  """Prints name and description of each cluster, as wide as the terminal."""
  from dilocox_jax.simulate.cluster_file import cluster_presets

  width = shutil.get_terminal_size().columns
  for name, preset in cluster_presets().items():
    text = f"{name:22} {preset['description']}"
    print(textwrap.fill(text, width, subsequent_indent=" " * 23))


def _refuse_beside_run(values: flags.FlagValues) -> None:
  """Refuses flags that say what the finished run itself says."""
  without = "to simulate a config, without --run"
  names = ("methods", "memory")
  command_line.refuse_unused(values, [(name, False, without) for name in names])
  if command_line.is_config_given():
    raise command_line.UsageError(
      "--run times a run with its own config: leave out --config"
    )


if __name__ == "__main__":
  command_line.main(main, define_flags)
