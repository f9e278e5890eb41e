r"""Computes what a run would cost on given links, without running it.

  python -m experiments.simulate --workdir=runs/simulated \
    --config=experiments/configs/papers.py:dilocox_opt_1_3b \
    --config.data.batch_size=8 --config.inner.accumulate_steps=4 \
    --cluster=dilocox_1.3b --step_s=1.4

This example is the run of 1.3 billion parameters in the paper on DiLoCoX. A
cluster is a preset (--cluster=help) or a JSON file such as
experiments/clusters/example.json.

The next command compares all methods. For each method that fits into the
devices it writes a config, which `experiments.train` reads:

  python -m experiments.simulate --workdir=runs/methods --methods=all \
    --config.model.preset=llama_1_1b --config.data.batch_size=256 \
    --config.data.sequence_length=1024 --cluster=200mbit --memory='80 GB'

Methods are ranked by the highest loss that is expected after equal time.
Methods that leave little memory free, and methods whose loss was never
measured, come last. The expected loss depends on s, the share by which
AllReduce's loss falls when its batch doubles. Without --losses, s is
extrapolated from the size of the model; `experiments.gap` measures s.
"""

import math
import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import app, flags

from experiments.runtime import (
  command_line,
  config_flag,
  losses_flag,
  memory_flag,
  parts_flag,
  run_configs,
  workdir_flag,
)

if TYPE_CHECKING:
  from dilocox_jax.api.simulation_setup import Options
  from dilocox_jax.config import RunConfig

flags.adopt_module_key_flags(config_flag)
flags.adopt_module_key_flags(losses_flag)
flags.adopt_module_key_flags(memory_flag)
flags.adopt_module_key_flags(workdir_flag)
_CLUSTER = flags.DEFINE_string(
  "cluster", "1gbit", "Preset or JSON file; 'help' lists the presets."
)
_METHODS = flags.DEFINE_enum(
  "methods",
  "own",
  ("own", "all", "growing"),
  "own: that of the config; all: every method, with layouts that fit; "
  "growing: the config's, with shorter rounds early and equal time.",
)
_STEP_S = flags.DEFINE_float(
  "step_s",
  None,
  "Seconds of an inner step; by default its operations over what the "
  "cluster's devices achieve.",
  lower_bound=0.0,
)
_CODEC_S = flags.DEFINE_float(
  "codec_s",
  0.0,
  "Seconds on the devices to encode and decode one exchange.",
  lower_bound=0.0,
)
_TRANSPORT = flags.DEFINE_enum(
  "transport",
  "nccl",
  ("nccl", "tpu", "gloo", "mailbox"),
  "nccl (GPUs): messages in pieces that follow one another; tpu: assumed the "
  "same; gloo (CPUs): a round trip for every 2 MiB; mailbox: replicas "
  "meet in a store (docs/mailbox/how_to.md).",
)
_TOKENS = flags.DEFINE_float(
  "tokens",
  None,
  "Tokens of a run, in place of total_steps, e.g. 20e9.",
  lower_bound=1.0,
  upper_bound=1e18,
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Simulates the runs that --methods asks for, and prints their costs.

  They are the run of --config (own), a run of every method (all), or runs whose
  rounds grow (growing). With own and all, a report is written to --workdir.
  With --cluster=help only the presets of clusters are printed.
  """
  command_line.refuse_arguments(argv)
  command_line.refuse_unused(
    losses_flag.LOSSES,
    is_used=_METHODS.value == "all",
    needs="--methods=all",
  )
  command_line.refuse_unused(
    memory_flag.MEMORY,
    workdir_flag.WORKDIR,
    is_used=_METHODS.value != "growing",
    needs="--methods=own or all",
  )
  if _CLUSTER.value == "help":
    _print_clusters()
    return
  parts_flag.register()
  config = _config()
  options = _options()
  if _METHODS.value == "all":
    _compare_methods(config, options)
  elif _METHODS.value == "growing":
    _propose_growing_rounds(config, options)
  else:
    _simulate_run(config, options)


def _config() -> "RunConfig":
  """Returns the config of the run, as --transport and --tokens change it.

  Raises UsageError if a field is wrong.
  """
  values = config_flag.CONFIG.value
  if _TRANSPORT.value == "mailbox":
    run_configs.set_field(values, "exchange", "collective", "mailbox")
  config = run_configs.run_config(values)
  if _TOKENS.value is None:
    return config
  step_tokens = config.tokens_per_replica_step * config.mesh.num_replicas
  with values.unlocked():
    values.total_steps = math.ceil(_TOKENS.value / step_tokens)
  return run_configs.run_config(values)


def _options() -> "Options":
  """Returns the simulation's settings that are in no config.

  Raises UsageError if --step_s or --codec_s is out of range.
  """
  from dilocox_jax.api.simulation_setup import Options

  transport = _TRANSPORT.value
  if transport == "mailbox":
    transport = "nccl"  # The run is compared with AllReduce over NCCL.
  with command_line.usage_errors():
    return Options(
      step_s=_STEP_S.value, codec_s=_CODEC_S.value, transport=transport
    )


def _simulate_run(config: "RunConfig", options: "Options") -> None:
  """Simulates the run of --config, and compares its speed with AllReduce's."""
  from dilocox_jax.api import method_plans
  from experiments import simulation_page

  with command_line.usage_errors(kinds=(ValueError, OSError)):
    plan = method_plans.plan_run(
      config,
      _CLUSTER.value,
      options,
      device_bytes=memory_flag.memory_bytes(),
    )
  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "simulate")
  simulation_page.report_plan(plan, workdir)


def _compare_methods(config: "RunConfig", options: "Options") -> None:
  """Simulates every method, and reports the methods from best to worst.

  The methods share the model, the text and the sizes of `config`.
  """
  from dilocox_jax.api import method_plans
  from experiments import simulation_page

  # The share by which AllReduce's loss falls when its batch doubles; None if
  # --losses is not given.
  gain = losses_flag.gain()
  with command_line.usage_errors(kinds=(ValueError, OSError)):
    plans, refused = method_plans.compare_methods(
      config,
      _CLUSTER.value,
      options,
      device_bytes=memory_flag.memory_bytes(),
      gain=gain,
    )
  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "simulate")
  simulation_page.report_methods(
    plans, refused, workdir, is_gain_known=gain is not None
  )


def _propose_growing_rounds(config: "RunConfig", options: "Options") -> None:
  """Prints schedules that exchange more often early in a run.

  Runs with these schedules take no more time than the run of `config`, whose
  rounds have one length.
  """
  from dilocox_jax.api import growing_plans
  from experiments import growing_page

  with command_line.usage_errors(kinds=(ValueError, OSError)):
    plans = growing_plans.growing_plans(config, _CLUSTER.value, options)
  growing_page.report(plans)


def _print_clusters() -> None:
  """Prints each cluster's name and description, wrapped to the terminal."""
  from dilocox_jax.simulate.cluster_file import cluster_presets

  width = shutil.get_terminal_size().columns
  for name, preset in cluster_presets().items():
    text = f"{name:22} {preset['description']}"
    print(textwrap.fill(text, width, subsequent_indent=" " * 23))


if __name__ == "__main__":
  app.run(main, flags_parser=config_flag.parse_flags)
