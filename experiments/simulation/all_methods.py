"""Every method on one cluster: a table, a page, and configs that run."""

import math
import pathlib
from collections.abc import Mapping, Sequence

from rich.console import Console

from dilocox_jax.api.method_plans import MethodPlan
from dilocox_jax.checks import flat
from dilocox_jax.config import RunConfig
from dilocox_jax.metrics.lines import write_atomically
from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.report import units
from dilocox_jax.report.page import write_page
from dilocox_jax.report.tables import (
  header_and_cells,
  markdown_table,
  terminal_table,
)
from experiments.runtime.command_line import own_command
from experiments.simulation.page import human_speed

# Learning rate of AdamW for a model of 125 M parameters, and the power by which
# it falls with size: a line through table 2.1 of Brown et al., 2020 (recalled).
_RATE, _RATE_PARAMETERS, _RATE_POWER = 6e-4, 125e6, -1 / 3
_CONFIG = '''"""{title} on {cluster}: {speed} (simulated).

The text and the learning rate are a beginning: set data.glob to your text, and
tune the rate. Start this in every process, each with its own --process_id, all
processes of the first cluster first:

    python -m experiments.train --config={path} \\
        --workdir=/shared/run --distributed --coordinator=HOST:9876 \\
        --num_processes={processes} --process_id=0
"""

from experiments.configs import default


def get_config():
  """Returns the default with this plan."""
  config = default.get_config()
  config.update_from_flattened_dict({{
{fields}  }})
  return config
'''


def report_methods(
  plans: Sequence[MethodPlan],
  refused: Mapping[str, str],
  tokens: float | None,
  workdir: pathlib.Path,
) -> None:
  """Prints the table; writes the page and the config of each plan that fits.

  Args:
    plans: Plans, the best first.
    refused: Why each other method does not go with the config.
    tokens: Tokens of the run; None: 20 a parameter.
    workdir: Directory to write into.
  """
  cluster = plans[0].setup.link_costs.cluster.name
  shape = plans[0].config.model.shape
  tokens = tokens or 20.0 * parameter_count(shape)
  title = f"Every method on {cluster}"
  rows = [_row(plan) for plan in plans]
  against = {p.config.sync.method: p.reason for p in plans if not p.fits}
  reasons = [f"{who}: {why}" for who, why in {**against, **refused}.items()]
  fitting = [plan for plan in plans if plan.fits]
  paths = [_write(plan, cluster, tokens, workdir) for plan in fitting]
  lines = [
    "Speeds and bytes are simulated, memory is estimated; nothing was measured."
    " Nothing is said about losses: see docs/results.md.",
    *("", *markdown_table(*header_and_cells(rows)), "", "## Ruled out", ""),
    *([f"- {reason}" for reason in reasons] or ["Nothing."]),
    *("", "## Configs", "", *(f"- `{path}`" for path in paths)),
  ]
  page = write_page(workdir, title, lines, own_command())
  header, cells = header_and_cells(rows)
  table = terminal_table(
    header[:-1],
    [each[:-1] for each in cells],
    title=title,
    collapse_padding=True,
  )
  table.columns[0].no_wrap = True
  console = Console()
  console.print(table)
  for reason in reasons:
    console.print(f"ruled out: {reason}", highlight=False, soft_wrap=True)
  if paths:
    print(f"config of the fastest that fits: {paths[0]}")
  else:
    print("no method fits: take more devices, or a smaller batch or model")
  print(f"report: {page}")


def _row(plan: MethodPlan) -> dict[str, str]:
  """Returns the cells of a plan; the terminal has no room for the last one."""
  config, schedule = plan.config, plan.config.sync.named.schedule
  mesh, cluster = config.mesh, plan.setup.link_costs.cluster
  used = mesh.num_stages * mesh.num_data_shards
  return {
    "method": config.sync.method,
    "tokens/s": human_speed(plan.tokens_per_s),
    "speed-up": f"{plan.speed_up:,.3g}x",
    "in steps": units.human_share(plan.rounds.utilisation),
    "sent/day": units.human_bytes(plan.bytes_per_day),
    "memory": units.human_bytes(plan.memory.total),
    "devices": f"{used}/{cluster.num_devices(0)}",
    "settings": f"H={schedule.sync_interval}, P={schedule.num_fragments}, "
    f"tau={schedule.overlap_steps}, {config.exchange.codec}, "
    f"stages {mesh.num_stages}",
  }


def _write(
  plan: MethodPlan, cluster: str, tokens: float, workdir: pathlib.Path
) -> pathlib.Path:
  """Writes a plan's config into WORKDIR/configs; returns its path."""
  config, method = plan.config, plan.config.sync.method
  path = workdir / "configs" / f"{method}.py"
  path.parent.mkdir(exist_ok=True)
  defaults = flat(RunConfig().to_mapping())
  fields = {
    name: value
    for name, value in flat(config.to_mapping()).items()
    if value != defaults[name]
  }
  mesh, interval = config.mesh, config.sync.named.schedule.sync_interval
  steps = tokens / (config.tokens_per_replica_step * mesh.num_replicas)
  fields["total_steps"] = math.ceil(steps / interval) * interval
  if "inner.learning_rate" not in fields:
    fields["inner.learning_rate"] = _learning_rate(config)
  devices = mesh.num_replicas * mesh.num_stages * mesh.num_data_shards
  text = _CONFIG.format(
    title=method,
    cluster=cluster,
    speed=f"{human_speed(plan.tokens_per_s)} tokens a second",
    path=path,
    processes=devices,
    fields="".join(f"    {k!r}: {v!r},\n" for k, v in fields.items()),
  )
  write_atomically(path, text)
  return path


def _learning_rate(config: RunConfig) -> float:
  """Returns a learning rate to begin with; Muon keeps the config's."""
  if config.inner.optimizer != "adamw":
    return config.inner.learning_rate
  ratio = parameter_count(config.model.shape) / _RATE_PARAMETERS
  return float(f"{_RATE * ratio**_RATE_POWER:.2g}")
