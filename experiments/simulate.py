r"""Computes what a run would cost on given links, without running it.

  python -m experiments.simulate --workdir=runs/simulated \
    --config=experiments/configs/papers.py:dilocox_opt_1_3b \
    --config.data.batch_size=8 --config.inner.accumulate_steps=4 \
    --cluster=dilocox_1.3b --step_s=1.4

DiLoCoX of 1.3 billion parameters fits into its devices, and is some 32 times as
fast as AllReduce (its paper has 32). A cluster is a preset (--cluster=help) or
a JSON file such as experiments/clusters/example.json. This compares all
methods, and writes a config that `train` takes for each that fits:

  python -m experiments.simulate --workdir=runs/methods --methods=all \
    --config.model.preset=llama_1_1b --config.data.batch_size=256 \
    --config.data.sequence_length=1024 --cluster=200mbit --memory='80 GB'
"""

import math
import shutil
import textwrap

from absl import flags

from experiments.runtime import command_line


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
    ("nccl", "tpu", "gloo", "mailbox"),
    "nccl (GPUs): messages in pieces that follow one another; tpu: assumed the "
    "same; gloo (CPUs): a round trip for every 2 MiB; mailbox: replicas "
    "meet in a store (docs/mailbox.md).",
  )
  flags.DEFINE_string(
    "memory", None, "Memory of a device, e.g. '80 GB'; else the cluster's."
  )
  text = "Tokens of a run, in place of total_steps, e.g. 20e9."
  flags.DEFINE_float("tokens", None, text, 1.0, 1e18)


def main(values: flags.FlagValues) -> None:
  """Simulates and prints the costs."""
  from dilocox_jax.api import method_plans
  from dilocox_jax.api.simulation_setup import Options
  from experiments import simulation_page

  if values.cluster == "help":
    _print_clusters()
    return
  with command_line.usage_errors(kinds=(ValueError, OSError)):
    transport = values.transport
    if transport == "mailbox":  # The config says so, and AllReduce has nccl.
      values.config.exchange.collective, transport = transport, "nccl"
    options = Options(values.step_s, values.codec_s, transport)
    memory = command_line.memory_bytes(values)
    config = command_line.run_config(values.config)
    if values.tokens:
      step_tokens = config.tokens_per_replica_step * config.mesh.num_replicas
      values.config.total_steps = math.ceil(values.tokens / step_tokens)
      config = command_line.run_config(values.config)
    args = config, values.cluster, options, memory
    if values.methods == "all":
      found = method_plans.compare_methods(*args)
    else:
      found = method_plans.plan_run(*args)
  workdir = command_line.writable(values.workdir, "simulate")
  if isinstance(found, method_plans.MethodPlan):
    simulation_page.report_plan(found, workdir)
  else:
    simulation_page.report_methods(*found, workdir)


def _print_clusters() -> None:
  """Prints name and description of each cluster, as wide as the terminal."""
  from dilocox_jax.simulate.cluster_file import cluster_presets

  width = shutil.get_terminal_size().columns
  for name, preset in cluster_presets().items():
    text = f"{name:22} {preset['description']}"
    print(textwrap.fill(text, width, subsequent_indent=" " * 23))


if __name__ == "__main__":
  command_line.main(main, define_flags)
