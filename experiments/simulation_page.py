"""What runs would cost: some lines on the terminal, the rest on a page."""

import dataclasses
import math
import pathlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich.console import Console

from dilocox_jax.api.method_plans import MethodPlan
from dilocox_jax.config.sections import InnerConfig
from dilocox_jax.metrics.lines import write_json
from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.report import units
from dilocox_jax.report.page import write_page
from dilocox_jax.report.tables import (
  header_and_cells,
  markdown_table,
  terminal_table,
)
from dilocox_jax.simulate.analytic import Outcome, run_time
from experiments.runtime.command_line import own_command
from experiments.sweeps import measured

Row = tuple[str, str, str]
_COLUMNS = ("quantity", "value", "kind")
# What NCCL has in flight by default: two channels of four slots of 512 KiB.
_NCCL_BYTES = 4 * 2**20


def _speed(tokens_per_s: float) -> str:
  """Returns tokens a second, e.g. "9.02", "3,724" or "2.77 M"."""
  if tokens_per_s >= 1e6:
    return f"{tokens_per_s / 1e6:.3g} M"
  is_large = tokens_per_s >= 1000
  return f"{tokens_per_s:,.0f}" if is_large else f"{tokens_per_s:.3g}"


def _answer(plan: MethodPlan) -> list[Row]:
  """Returns the rows that say whether a plan is any good."""
  interval = plan.config.sync.named.schedule.sync_interval
  sent = units.human_bytes(plan.rounds.sent_bytes * interval)
  often = f"{interval} steps" if interval > 1 else "step"
  base = f"AllReduce: {_speed(plan.allreduce_tokens_per_s)}"
  speed, count = _speed(plan.tokens_per_s), plan.config.mesh.num_replicas
  memory = units.human_bytes(plan.memory.total)
  if math.isfinite(plan.device_bytes):
    verdict = "fits" if plan.fits else "does not fit"
    memory = f"{verdict}: {memory} of {units.human_bytes(plan.device_bytes)}"
  share = units.human_share(plan.rounds.utilisation)
  a_day = units.human_bytes(plan.bytes_per_day)
  speed_up = f"{plan.speed_up:,.3g} times ({base})"
  return [
    ("speed-up over AllReduce", speed_up, "simulated"),
    ("tokens a second", f"{speed}, {count} replicas together", "simulated"),
    ("time in inner steps", share, "simulated"),
    ("sent by a replica", f"{sent} every {often}, {a_day} a day", "derived"),
    ("memory of a device", memory, "estimated"),
  ]


def report_plan(plan: MethodPlan, workdir: pathlib.Path) -> None:
  """Prints the answer; writes the page and `simulation.json`.

  Args:
    plan: The run and its costs.
    workdir: Directory to write into.
  """
  setup, rows = plan.setup, _answer(plan)
  whole = run_time(setup.link_costs, setup.work, setup.script.ops(setup.plan))
  title = f"{plan.config.sync.method} on {setup.link_costs.cluster.name}"
  lines = ["Everything on this page is computed; nothing was measured.", ""]
  lines += markdown_table(_COLUMNS, [*rows, *_details(plan, whole)])
  lines += ["", "## Assumptions", "", *(f"- {each}" for each in _notes(plan))]
  numbers = {
    "tokens_per_s": plan.tokens_per_s,
    "speed_up": plan.speed_up,
    "memory_bytes": plan.memory.total,
    "whole_run": dataclasses.asdict(whole),
    "a_step": dataclasses.asdict(plan.rounds),
  }
  write_json(workdir / "simulation.json", numbers)
  path = write_page(workdir, title, lines, own_command())
  Console().print(terminal_table(_COLUMNS, rows, (0, 1, 2), title=title))
  if not plan.fits:
    print("--methods=all tries every division of a replica among devices")
  print(f"report: {path}")


def _details(plan: MethodPlan, whole: Outcome) -> Iterator[Row]:
  rounds = plan.rounds
  interval = plan.config.sync.named.schedule.sync_interval
  times_s = {
    "exchanges of a round": rounds.exchange_s * interval,
    "the whole run": whole.total_s,
    "its inner steps": np.mean(whole.compute_s),
    "its codec": np.mean(whole.codec_s),
    "its waiting for exchanges": np.mean(whole.exposed_s),
    "its exchanges behind steps": np.mean(whole.hidden_s),
  }
  least = f"{rounds.hiding_interval(interval):,}"
  yield "seconds a step", f"{rounds.step_s:.4g}", "simulated"
  yield "least H whose steps take as long", least, "simulated"
  for name, time_s in times_s.items():
    yield f"time of {name}", units.human_time(float(time_s)), "simulated"
  yield "steps of the whole run", f"{whole.num_steps:,}", "counted"
  sent = units.human_bytes(whole.sent_bytes)
  yield "bytes of the whole run", sent, "derived"
  bubble = units.human_share(plan.setup.bubble_fraction)
  yield "idle share of a pipeline", bubble, "derived"


def _notes(plan: MethodPlan) -> Iterator[str]:
  setup, config = plan.setup, plan.config
  costs, steps_s = setup.link_costs, setup.work.step_s
  rtts_ms = [1e3 * site.link.rtt_s for site in costs.cluster.sites]
  yield "docs/simulator.md says what is left out."
  yield (
    f"Round trips between sites take {min(rtts_ms):g} to {max(rtts_ms):g} ms,"
    f" an inner step {min(steps_s):.4g} to {max(steps_s):.4g} s, by replica."
  )
  needed = float(max(costs.rate_bytes_per_s(1) * costs.latency_s(1))) * 4 / 3
  is_nccl = costs.transport.pieces > 1 and not config.meets
  if is_nccl and _NCCL_BYTES < needed < math.inf:
    yield (
      "NCCL's default buffers are too small to keep this line busy: set "
      f"NCCL_BUFFSIZE to {math.ceil(needed / 2**20) * 2**20:,} or more. The "
      "times here assume that."
    )
  schedule = setup.plan.method.schedule
  if schedule.hiding_steps < schedule.overlap_steps:
    yield (
      f"overlap_steps={schedule.overlap_steps} hides an exchange behind as few "
      f"as {schedule.hiding_steps} steps: it begins with the window in which "
      "it arrives, so more than sync_interval / num_fragments only delays it."
    )
  if config.adaptive.mode != "off":
    yield "The rank and H are those of the config; what adapts is not foreseen."


def report_methods(
  plans: Sequence[MethodPlan], refused: Mapping[str, str], workdir: pathlib.Path
) -> None:
  """Prints the table; writes the page, and a config of each plan that fits.

  Args:
    plans: Plans, the best first.
    refused: Why each other method does not go with the config.
    workdir: Directory to write into.
  """
  title = f"Every method on {plans[0].setup.link_costs.cluster.name}"
  header, cells = header_and_cells([_row(plan) for plan in plans])
  against = {p.config.sync.method: p.reason for p in plans if not p.fits}
  reasons = [f"{who}: {why}" for who, why in {**against, **refused}.items()]
  paths = [_write(plan, workdir) for plan in plans if plan.fits]
  losses = measured.words(plans[0].config.mesh.num_replicas)
  lines = [
    "Speeds and bytes are simulated, memory is estimated.",
    *("", losses),
    *("", *markdown_table(header, cells), "", "## Ruled out", ""),
    *([f"- {reason}" for reason in reasons] or ["Nothing."]),
    *("", "## Configs", "", *(f"- `{path}`" for path in paths)),
  ]
  page = write_page(workdir, title, lines, own_command())
  # The terminal has no room for the last column.
  shown = header[:-1], [row[:-1] for row in cells]
  table = terminal_table(*shown, title=title, collapse_padding=True)
  table.columns[0].no_wrap = True
  console = Console()
  console.print(table)
  for reason in reasons:
    console.print(f"ruled out: {reason}", highlight=False, soft_wrap=True)
  print(losses)
  advice = "no method fits: take more devices, or a smaller batch or model"
  print(_start(plans[0], paths[0]) if paths else advice)
  for plan in plans[1:]:
    if plan.fits and _speed(plan.tokens_per_s) == _speed(plans[0].tokens_per_s):
      print(f"as fast: {plan.config.sync.method}; losses: docs/results.md")
  print(f"report: {page}")


def _write(plan: MethodPlan, workdir: pathlib.Path) -> str:
  """Writes the config of a plan; returns what follows --config=."""
  config, values = plan.config, plan.config.to_mapping()
  is_unset = config.inner.learning_rate == InnerConfig.learning_rate
  if is_unset and config.inner.optimizer == "adamw":
    # A line through table 2.1 of Brown et al., 2020 (recalled).
    scale = (parameter_count(config.model.shape) / 125e6) ** (-1 / 3)
    values["inner"]["learning_rate"] = float(f"{6e-4 * scale:.2g}")
  path = workdir / f"{config.sync.method}.json"
  write_json(path, values)
  return f"experiments/configs/default.py:{path}"


def _start(plan: MethodPlan, config: str) -> str:
  """Returns the command that trains a plan, and where it runs."""
  one, cluster = plan.config, plan.setup.link_costs.cluster
  sites = [cluster.site(rank).name for rank in range(cluster.num_replicas)]
  numbers = ", ".join(f"{rank} at {name}" for rank, name in enumerate(sites))
  host, seen = f"HOST a machine at {sites[0]}", "/shared (or docs/clusters.md)"
  flags = (
    "--workdir=/shared/run --distributed --coordinator=HOST:9876 \\\n"
    f"    --num_processes={len(sites)} --process_id=N"
  )
  if one.meets:
    host, seen = "PLACE a folder or bucket", "run.secret (docs/mailbox.md)"
    flags = "--workdir=run --meet=PLACE --secret=run.secret --replica=N"
  where = (
    f"{one.sync.method}, {one.total_steps:,} steps (--tokens) in "
    f"{units.human_time(one.total_steps * plan.rounds.step_s)}: N is {numbers},"
    f" {host}, and every process sees {one.division.num_devices} devices and"
    f" {seen}. Choose the text (data.glob) and a learning rate."
  )
  return (
    f"{textwrap.fill(where, 80)}\n\n"
    f"  python -m experiments.train \\\n    --config={config} \\\n    {flags}\n"
  )


def _row(plan: MethodPlan) -> dict[str, str]:
  config, schedule = plan.config, plan.config.sync.named.schedule
  mesh, cluster = config.mesh, plan.setup.link_costs.cluster
  return {
    "method": config.sync.method,
    "tokens/s": _speed(plan.tokens_per_s),
    "speed-up": f"{plan.speed_up:,.3g}x",
    "in steps": units.human_share(plan.rounds.utilisation),
    "sent/day": units.human_bytes(plan.bytes_per_day),
    "memory": units.human_bytes(plan.memory.total),
    "devices": f"{config.division.num_devices}/{cluster.num_devices(0)}",
    "settings": f"H={schedule.sync_interval}, P={schedule.num_fragments}, "
    f"tau={schedule.overlap_steps}, {config.exchange.codec}, "
    f"stages {mesh.num_stages}",
  }
