"""Computes the pace of runs from the recipes and plans of the trainer.

Steps and bytes are those of the plan that the trainer would follow: no table
counts them itself.
"""

from collections.abc import Callable

import numpy as np

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.checks import flat
from dilocox_jax.codecs.base import Codec
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.plan.operations import Operation
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.simulate import steps
from dilocox_jax.simulate.analytic import Work, run_time
from dilocox_jax.simulate.cluster import Cluster, Link, Site
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.script import Launch, Script, Wait
from dilocox_jax.simulate.transfer import NCCL, Transport

# Payload share of a line rate, without the headers of TCP and Ethernet.
GOODPUT = Link.efficiency


def config_of(method: str, **changes) -> RunConfig:
  """Returns the recipe of a method with fields changed.

  Args:
    method: Name of the method.
    **changes: Values by field, for each section.
  """
  # All fields of the recipe are written out, since the change may be another
  # name of the method, which would bring another recipe.
  values = from_mapping({"sync.method": method}).to_mapping()
  # A table has one rank and one H.
  values |= {"adaptive.mode": "off"} | flat(changes)
  return from_mapping(values)


def equal_links(
  num_replicas: int, up_bps: float, down_bps: float | None = None, **link
) -> Cluster:
  """Returns sites of one replica each, with equal links.

  Args:
    num_replicas: Number of sites. Any number is allowed, while presets that
      divide devices need a divisor.
    up_bps: Line rate for what leaves (bit/s).
    down_bps: Line rate for what arrives; None: the same.
    **link: Other attributes of `Link`.
  """
  site_link = Link(up_bps, down_bps or up_bps, **link)
  sites = [Site(f"site{number}", site_link) for number in range(num_replicas)]
  return Cluster("alike", tuple(sites))


def flat_traffic(
  method: Method, num_parameters: float, num_replicas: int, codec: Codec
) -> Traffic:
  """Returns the traffic of a model that is sent as one tensor.

  Args:
    method: Method of the run.
    num_parameters: Number of parameters.
    num_replicas: Number of replicas.
    codec: Codec of the values.
  """
  return Traffic(
    method=method,
    fragments=Fragments(num_fragments=1, num_layers=1),
    shapes={"parameters": (int(num_parameters),)},
    num_replicas=num_replicas,
    codec=codec,
  )


def collective_s(
  cluster: Cluster, transport: Transport, collective: Operation
) -> float:
  """Returns the simulated seconds of a collective after idle time.

  Args:
    cluster: Cluster of all replicas.
    transport: How messages are sent.
    collective: The collective.
  """
  no_work = np.zeros(cluster.num_replicas)
  key = ("collective", 0, 0, 0)
  ops = [Launch(key, (collective,)), Wait(key)]
  return run_time(
    LinkCosts(cluster, transport), Work(no_work, no_work), ops
  ).total_s


def pace(
  traffic: Traffic,
  cluster: Cluster,
  step_s: float,
  codec_s: float = 0.0,
  transport: Transport = NCCL,
) -> steps.SteadyState:
  """Returns the pace of a run on a cluster.

  Args:
    traffic: Method, model, payload and number of replicas.
    cluster: Cluster of as many replicas.
    step_s: Seconds of an inner step at speed 1; a site of speed 0.5 takes
      twice as long.
    codec_s: Seconds of encoding and decoding that nothing hides.
    transport: How messages are sent.
  """
  interval = traffic.method.schedule.sync_interval
  steps_s = steps.stated_seconds(cluster, step_s)
  work = Work(steps_s, np.full(cluster.num_replicas, codec_s))
  costs = LinkCosts(cluster, transport)
  plan = RunPlan(traffic.method, interval, steps_per_dispatch=1)
  return steps.steady_state(costs, work, Script(traffic), plan)


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
