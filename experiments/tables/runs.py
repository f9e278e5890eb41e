"""Runs in their steady state, from the recipes that train and real plans.

A table needs the pace of a run, without its first and last round. So three
rounds are left out, four are measured, and all come from the plan that the
trainer would follow: no table counts a step or a byte itself.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.codecs.base import Codec
from dilocox_jax.config import RunConfig, from_mapping, to_plan
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.simulate.analytic import AnalyticClock, Work
from dilocox_jax.simulate.cluster import Cluster, Link, Site, equal_sites
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.script import Script
from dilocox_jax.simulate.steps import stated_seconds

# Payload share of a line rate, without the headers of TCP and Ethernet.
GOODPUT = Link.efficiency


def config_of(method: str, **changes) -> RunConfig:
  """Returns the recipe of a method with fields changed.

  Args:
    method: Name of the method.
    **changes: Values by field, for each section.
  """
  # A recipe is spelled out, since what is changed may be the method's name.
  values = from_mapping({"sync": {"method": method}}).to_mapping()
  values["adaptive"]["mode"] = "off"  # A table has one rank and one H.
  for section, fields in changes.items():
    values[section] |= fields
  return from_mapping(values)


def equal_links(num_replicas: int, bps: float, **link) -> Cluster:
  """Returns sites of one replica each, with equal links in both directions.

  Args:
    num_replicas: Number of sites. Any number is allowed, while presets that
      divide devices need a divisor.
    bps: Line rate (bit/s).
    **link: Other attributes of `Link`.
  """
  site = Site("site", Link(bps, bps, **link))
  return equal_sites("alike", site, num_replicas)


def flat_traffic(
  method: Method, num_parameters: float, num_replicas: int, codec: Codec
) -> Traffic:
  """Returns the traffic of a model that is sent as one tensor.

  Args:
    method: Method of the run.
    num_parameters: Number of parameters, all that is known of the model.
    num_replicas: Number of replicas.
    codec: How values are sent.
  """
  shapes = {"parameters": (int(num_parameters),)}
  return Traffic(method, Fragments(1, 1), shapes, num_replicas, codec)


@dataclasses.dataclass(frozen=True)
class Pace:
  """The steady state of a run.

  Attributes:
    seconds: Duration of an inner step, exchanges included.
    utilisation: Share of the time in which replicas take inner steps.
    exchange_s: Duration of all exchanges of a round (seconds).
    sent_bytes: Bytes that one replica sends in a round.
  """

  seconds: float
  utilisation: float
  exchange_s: float
  sent_bytes: int


class Rounds:
  """A few rounds of a run, planned once and timed on any cluster."""

  def __init__(self, traffic: Traffic, skipped: int = 3, counted: int = 4):
    """Plans the rounds.

    Args:
      traffic: Method, model, payload and number of replicas.
      skipped: Rounds before the steady state.
      counted: Rounds that are measured.
    """
    interval = traffic.method.schedule.sync_interval
    # One round more: the last round of a run is flushed, and is not typical.
    total = (skipped + counted + 1) * interval
    plan = RunPlan(traffic.method, total, steps_per_dispatch=1)
    script = Script(traffic)
    self.traffic, self._counted, self._interval = traffic, counted, interval
    self._before = list(script.ops(plan, skipped * interval))
    both = script.ops(plan, (skipped + counted) * interval)
    self._ops = list(both)[len(self._before) :]

  @classmethod
  def of(cls, config: RunConfig, *counts: int) -> "Rounds":
    """Plans the rounds of a config; `counts` as for the class."""
    return cls(to_plan.traffic(config), *counts)

  def on(self, cluster: Cluster, step_s: float, codec_s: float = 0.0) -> Pace:
    """Times the rounds on a cluster.

    Args:
      cluster: Cluster of as many replicas as were planned for.
      step_s: Seconds of an inner step at speed 1; a site of speed 0.5 takes
        twice as long.
      codec_s: Seconds of encoding and decoding that nothing hides.
    """
    steps_s = stated_seconds(cluster, step_s)
    work = Work(steps_s, np.full(cluster.num_replicas, codec_s))
    clock = AnalyticClock(LinkCosts(cluster), work)
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
  """Finds the least value that reaches a target, by bisection of the ratio.

  Args:
    reaches: Whether a value is enough. All larger values must then be enough.
    low: A value that is not enough.
    high: The largest value that is tried.
    precision: Relative precision.

  Returns:
    The value, rounded up; infinity if `high` is not enough.
  """
  if not reaches(high):
    return float("inf")
  while high / low > 1 + precision:
    middle = (low * high) ** 0.5
    low, high = (low, middle) if reaches(middle) else (middle, high)
  return high
