"""Runs both paths of the simulator and writes the page that compares them."""

import collections
import dataclasses
import math
import pathlib
from collections.abc import Iterator

import numpy as np
from rich.console import Console

from dilocox_jax.api.simulation_setup import Options, Setup, set_up
from dilocox_jax.config import RunConfig
from dilocox_jax.report import simulation, units
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.lowering import fits, lower, simulate
from dilocox_jax.simulate.outcome import Outcome
from dilocox_jax.simulate.script import Launch
from dilocox_jax.simulate.steady_state import SteadyState, steady_state
from dilocox_jax.simulate.trace import bars, chrome_trace
from experiments.runtime.command_line import own_command

_ROUNDS = 6
_MOST_NODES = 300_000


def prepare(
  config: RunConfig, cluster_name: str, options: Options
) -> simulation.SimulatedRun:
  """Runs both paths.

  Args:
    config: Config of the run.
    cluster_name: Name of a preset, or path of a file.
    options: What config and cluster leave open.

  Raises:
    ValueError: One line that says what does not fit.
  """
  setup = set_up(config, cluster_name, options)
  plan, link_costs, work = setup.plan, setup.link_costs, setup.work
  whole = run_time(link_costs, work, setup.script.ops(plan))
  # A graph of the whole run could be too large, so the engine gets six rounds.
  interval = plan.method.schedule.sync_interval
  stop = options.engine_steps or plan.warm_start_steps + _ROUNDS * interval
  ops = list(setup.script.ops(plan, min(stop, plan.total_steps)))
  start = run_time(link_costs, work, ops)
  if not fits(ops, link_costs.cluster.num_replicas, _MOST_NODES):
    return _page(config, setup, whole, start, None)
  lowered = lower(link_costs, work, ops)
  engine, timeline = simulate(lowered)
  starts, ends = timeline.start_s.tolist(), timeline.end_s.tolist()
  tags = lowered.graph.tags
  drawn = [
    simulation.Bar(track, lane, starts[task], ends[task], tags[task])
    for track, lane, task in bars(lowered.graph, timeline)
  ]
  page = _page(config, setup, whole, start, engine)
  trace = chrome_trace(lowered.graph, timeline)
  return dataclasses.replace(page, bars=drawn, trace=trace)


def _page(
  config: RunConfig,
  setup: Setup,
  whole: Outcome,
  start: Outcome,
  engine: Outcome | None,
) -> simulation.SimulatedRun:
  step_s = whole.total_s / whole.num_steps
  bubble = setup.bubble_fraction
  replica_steps = sum(
    segment.replica_steps(config.mesh.num_replicas)
    for segment in setup.plan.segments()
  )
  tokens = replica_steps * config.tokens_per_replica_step
  gap = math.nan if engine is None else engine.total_s / start.total_s - 1
  numbers = {
    "seconds_a_step": step_s,
    "tokens_per_s": tokens / whole.total_s,
    "utilisation": whole.utilisation,
    "total_s": whole.total_s,
    "compute_s": float(np.mean(whole.compute_s)),
    "codec_s": float(np.mean(whole.codec_s)),
    "exposed_s": float(np.mean(whole.exposed_s)),
    "hidden_s": float(np.mean(whole.hidden_s)),
    "sent_bytes": whole.sent_bytes,
    "bubble_fraction": bubble,
    "engine_over_formula": gap,
    "engine_steps": start.num_steps,
  }
  args = setup.link_costs, setup.work, setup.script, setup.plan
  rounds = steady_state(*args)
  formula, both = "derived: formula, whole run", "derived: both"
  compared = f"event engine over formula, {start.num_steps:,} steps"
  quantities = [
    ("seconds a step", f"{step_s:.4g}", formula),
    ("tokens a second", f"{numbers['tokens_per_s']:,.0f}", formula),
    ("compute utilisation", units.human_share(whole.utilisation), formula),
    ("whole run", _human_s(whole.total_s), formula),
    ("inner steps", _human_s(numbers["compute_s"]), formula),
    ("codec", _human_s(numbers["codec_s"]), "given"),
    ("exposed communication", _human_s(numbers["exposed_s"]), formula),
    ("hidden communication", _human_s(numbers["hidden_s"]), formula),
    ("bytes sent a replica", units.human_bytes(whole.sent_bytes), "plan"),
    *_of_rounds(rounds, config.sync.named.schedule.sync_interval),
    ("pipeline bubble", units.human_share(bubble), "derived: ticks"),
    (compared, "too large" if engine is None else units.human_gap(gap), both),
  ]
  return simulation.SimulatedRun(
    title=f"{config.sync.method} on {setup.link_costs.cluster.name}",
    quantities=quantities,
    links=_links(setup, whole),
    numbers=numbers,
    notes=tuple(_notes(config, setup)),
  )


def _of_rounds(
  rounds: SteadyState, sync_interval: int
) -> list[tuple[str, str, str]]:
  """Returns rows about a round in the middle of a long run."""
  kind = "derived: later rounds"
  least = rounds.hiding_interval(sync_interval)
  return [
    ("seconds a step, steady state", f"{rounds.step_s:.4g}", kind),
    (
      "compute utilisation, steady state",
      units.human_share(rounds.utilisation),
      kind,
    ),
    ("line busy a round", _human_s(rounds.exchange_s * sync_interval), kind),
    ("H whose steps take as long", f"{least:,}", kind),
  ]


def _human_s(seconds: float) -> str:
  if seconds < 600:
    return f"{seconds:.4g} s"
  if seconds < 36_000:
    return f"{seconds / 60:.4g} min"
  return f"{seconds / 3600:,.4g} h"


def _links(setup: Setup, whole: Outcome) -> dict:
  times = collections.Counter(
    (op.members, operation)
    for op in setup.script.ops(setup.plan)
    if isinstance(op, Launch)
    for operation in op.operations
  )
  carried: dict[str, float] = collections.defaultdict(float)
  for (members, operation), count in times.items():
    ring = setup.link_costs.among(members)
    for link, size in ring.link_bytes(operation).items():
      carried[link] += count * size
  links = {}
  for link, total in sorted(carried.items()):
    capacity = setup.link_costs.capacities[link]
    used = total / capacity / whole.total_s if math.isfinite(capacity) else 0.0
    links[link] = (8 * capacity, total, used)
  return links


def _notes(config: RunConfig, setup: Setup) -> Iterator[str]:
  cluster = setup.link_costs.cluster
  rtts_ms = [1e3 * site.link.rtt_s for site in cluster.sites]
  yield (
    f"Round trips between sites take {min(rtts_ms):g} to {max(rtts_ms):g} ms; "
    "a cluster file that does not state `rtt` gets 40 ms, which is too long "
    "for a local network."
  )
  yield (
    f"An inner step takes {np.min(setup.work.step_s):.4g} to "
    f"{np.max(setup.work.step_s):.4g} s, by replica."
  )
  yield (
    "A collective is a ring in rank order; exchanges of a replica follow one "
    "another; a message costs "
    f"{setup.link_costs.transport.rtts_per_message:g} round trips beside its "
    "bytes."
  )
  yield "The formula takes replicas that share links to be in step."
  schedule = setup.plan.method.schedule
  if schedule.hiding_steps < schedule.overlap_steps:
    yield (
      f"overlap_steps={schedule.overlap_steps} hides an exchange behind as few "
      f"as {schedule.hiding_steps} steps: it begins with the window in which "
      "it arrives, so more than sync_interval / num_fragments only delays it."
    )
  if config.adaptive.mode != "off":
    yield "The rank and H are those of the config; what adapts is not foreseen."


def report_simulation(
  run: simulation.SimulatedRun, workdir: pathlib.Path
) -> None:
  """Writes page and trace, and prints the table."""
  path = simulation.write_simulation(run, workdir, own_command())
  simulation.print_simulation(run, Console())
  print(f"report: {path}")
