r"""Proposes methods, schedules and meshes for a model on given clusters.

  python -m experiments.advise --cluster=dilocox_107b --workdir=runs/advice \
    --config.model.preset=qwen_107b --config.data.batch_size=128

Takes the model and the batch of a replica from a config, and a cluster: a
preset or a JSON file (--cluster=help lists the presets). Every method is priced
by the simulator, and its loss is expected from this repository's own sweeps.
The page, a figure, and a config file for each method go to WORKDIR.
"""

import math

from absl import flags

from experiments.runtime import command_line


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_config()
  command_line.define_workdir()
  flags.DEFINE_string(
    "cluster", "1gbit", "Preset or JSON file; 'help' lists the presets."
  )
  flags.DEFINE_float(
    "max_gap",
    3.0,
    "Largest expected gap to AllReduce that is tolerated (per cent).",
    lower_bound=0.0,
  )
  flags.DEFINE_string("memory", None, "Memory of a device, e.g. '80 GB'.")
  flags.DEFINE_string(
    "send", None, "What a replica may send in a day, e.g. '2 TB'."
  )
  flags.DEFINE_float(
    "tokens", None, "Tokens of the run; by default 20 a parameter."
  )
  flags.DEFINE_float(
    "step_s",
    None,
    "Seconds of an inner step with the mesh of the config; by default they are "
    "derived, and meshes are compared.",
    lower_bound=0.0,
  )
  flags.DEFINE_bool("explain", False, "Say why the other methods lost.")


def main(values: flags.FlagValues) -> None:
  """Compares the settings and writes what was found."""
  from rich.console import Console
  from rich.progress import Progress

  from dilocox_jax.api.advice import Limits, advise
  from dilocox_jax.checks import require
  from dilocox_jax.plan.model.shapes import parameter_count
  from dilocox_jax.simulate.quantities import SIZE, parse_quantity
  from experiments.simulation import advice as page
  from experiments.simulation import cluster_list

  if values.cluster == "help":
    cluster_list.print_clusters()
    return
  for name in ("max_gap", "tokens", "step_s"):
    value = values[name].value
    if value is not None and not 0 <= value < math.inf:
      raise command_line.UsageError(
        f"--{name}={value} must be a number of at least 0"
      )
  if values.tokens == 0:
    raise command_line.UsageError("--tokens=0.0 must be above 0")
  config = command_line.run_config(values.config)
  workdir = command_line.writable(values.workdir, "advise")
  with command_line.usage_errors(kinds=(ValueError, OSError)):
    sizes = {
      name: parse_quantity(text, SIZE, f"--{flag}")
      for name, flag, text in (
        ("device_bytes", "memory", values.memory),
        ("bytes_per_day", "send", values.send),
      )
      if text
    }
    require(
      all(size > 0 for size in sizes.values()),
      "--memory and --send must be above 0",
    )
    is_drawn = Console().is_terminal
    with Progress(transient=True, disable=not is_drawn) as bar:
      task = bar.add_task("comparing", total=None)
      found = advise(
        config,
        values.cluster,
        on_progress=lambda n, of: bar.update(task, completed=n, total=of),
        limits=Limits(values.max_gap, **sizes),
        step_s=values.step_s,
      )
  tokens = values.tokens
  if tokens is None:
    tokens = 20.0 * parameter_count(config.model.shape)
  page.print_advice(found, tokens, values.explain)
  paths = page.write_advice(found, config, values.cluster, tokens, workdir)
  for path in paths:
    print(path)
  if found.best is None:
    raise command_line.StoppedError(
      "no setting keeps all limits; of the first, "
      f"{found.proposals[0].config.sync.method}: "
      f"{found.proposals[0].against}; raise --max_gap, --memory or --send, or "
      "take more devices"
    )


if __name__ == "__main__":
  command_line.main(main, define_flags)
