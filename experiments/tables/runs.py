"""Runs in their steady state, from the configs that train and real plans.

A table wants the pace of a run, not its first and last round. So a few rounds
are left out, a few are measured, and both come from the very plan that the
trainer would walk: no table counts a step or a byte itself.
"""

import dataclasses
import importlib
from collections.abc import Callable

import numpy as np

from dilocox_jax.config import RunConfig, from_mapping, to_plan
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.plan.wire.traffic import Traffic
from dilocox_jax.simulate import presets
from dilocox_jax.simulate.analytic import AnalyticClock
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.compute import stated_seconds
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.outcome import Work
from dilocox_jax.simulate.script import Script
from dilocox_jax.simulate.sites import Link, Site
from dilocox_jax.simulate.transfer import TCP, Transport

GOODPUT = (
  Link.efficiency
)  # Of a line rate, after the headers of TCP and Ethernet.
_SKIPPED, _COUNTED = 3, 4


def config_of(name: str, **changes) -> RunConfig:
  """A config of `experiments/configs` with fields changed; nothing adapts.

  Args:
    name: Of its file.
    **changes: Section to a mapping from field to value.
  """
  module = importlib.import_module(f"experiments.configs.{name}")
  values = module.get_config().to_dict()
  values["adaptive"]["mode"] = "off"  # A table has one rank and one H.
  for section, fields in changes.items():
    values[section] |= fields
  return from_mapping(values)


def equal_links(
  num_replicas: int, bps: float, name: str = "alike", **link
) -> Cluster:
  """Sites with equal links the same both ways, one replica each.

  Args:
    num_replicas: Sites; any number, unlike a preset that divides devices.
    bps: Line rate (bit/s).
    name: Of the cluster.
    **link: What else `Link` takes.
  """
  one = Site("site", Link(bps, bps, **link))
  return presets.equal_sites(name, one, num_replicas)


@dataclasses.dataclass(frozen=True)
class Pace:
  """The steady state of a run.

  Attributes:
    seconds: Of an inner step, all counted.
    utilisation: Share of the time in which replicas take inner steps.
    exchange_s: Length of all exchanges of a round.
    sent_bytes: By a replica in a round.
  """

  seconds: float
  utilisation: float
  exchange_s: float
  sent_bytes: int


class Rounds:
  """A few rounds of a run, planned once and timed on any cluster."""

  def __init__(
    self, traffic: Traffic, skipped: int = _SKIPPED, counted: int = _COUNTED
  ):
    """Plans the rounds.

    Args:
      traffic: Method, model, payload, number of replicas.
      skipped: Rounds before the steady state.
      counted: Rounds that are measured.
    """
    interval = traffic.method.schedule.sync_interval
    # One round more, so that the run does not end in those counted.
    total = (skipped + counted + 1) * interval
    plan = RunPlan(traffic.method, total, steps_per_dispatch=1)
    script = Script(traffic)
    self.traffic, self._counted, self._interval = traffic, counted, interval
    self._before = list(script.ops(plan, skipped * interval))
    both = script.ops(plan, (skipped + counted) * interval)
    self._ops = list(both)[len(self._before) :]

  @classmethod
  def of(cls, config: RunConfig, **counts) -> "Rounds":
    """The rounds of a config."""
    return cls(to_plan.traffic(config), **counts)

  def on(
    self,
    cluster: Cluster,
    step_s: float,
    codec_s: float = 0.0,
    transport: Transport = TCP,
  ) -> Pace:
    """Times them; sites take as long as their speed says.

    Args:
      cluster: Of as many replicas as were planned for.
      step_s: Seconds of an inner step at speed 1.
      codec_s: Seconds of encoding and decoding that nothing hides.
      transport: How messages are sent.
    """
    steps_s = stated_seconds(cluster, step_s).seconds
    work = Work(steps_s, np.full(cluster.num_replicas, codec_s))
    clock = AnalyticClock(LinkCosts(cluster, transport), work)
    first, last = clock.walk(self._before), clock.walk(self._ops)
    took_s = last.now_s - first.now_s
    compute_s = np.mean(last.compute_s - first.compute_s)
    exchange_s = np.mean(last.exchange_s - first.exchange_s)
    return Pace(
      took_s / (self._counted * self._interval),
      float(compute_s) / took_s,
      float(exchange_s) / self._counted,
      (last.sent_bytes - first.sent_bytes) // self._counted,
    )


def least(
  reaches: Callable[[float], bool],
  low: float,
  high: float,
  precision: float = 1e-3,
) -> float:
  """The least value from which on something holds, by halving ratios.

  Args:
    reaches: Whether it holds; once it does, it does for all larger values.
    low: A value below.
    high: A value above.
    precision: Relative.

  Returns:
    The value, rounded up; infinity if it does not even hold at `high`.
  """
  if not reaches(high):
    return float("inf")
  while high / low > 1 + precision:
    middle = (low * high) ** 0.5
    low, high = (low, middle) if reaches(middle) else (middle, high)
  return high
