"""Simulates runs of papers with the configs and plans of the trainer."""

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

# Share of a line rate that is payload, and not headers of TCP and Ethernet.
GOODPUT = Link.efficiency


def config_of(method: str, **changes) -> RunConfig:
  """Returns a method's own config (its recipe), with some fields changed.

  Rank and H stay fixed: `adaptive.mode` is "off" unless `changes` sets it.

  Args:
    method: Name of the method. Its recipe sets the codec, the optimizers and
      the schedule.
    **changes: Values by field, for each section of the config. Example:
      sync={"sync_interval": 125}. A change of `sync.method` changes the method,
      but the other fields keep the values of the first method's recipe.
  """
  # The config with all fields set. A change of `sync.method` alone would bring
  # the recipe of the new method.
  values = from_mapping({"sync.method": method}).to_mapping()
  # Rank and H of a published run do not change while it trains.
  values |= {"adaptive.mode": "off"} | flat(changes)
  return from_mapping(values)


def equal_links(
  num_replicas: int, up_bps: float, down_bps: float | None = None, **link
) -> Cluster:
  """Returns a cluster of sites (places of a replica) with equal links.

  Args:
    num_replicas: Number of sites, M.
    up_bps: Line rate of a site's uplink (bit/s).
    down_bps: Line rate of a site's downlink (bit/s); None: that of the uplink.
    **link: Other attributes of `Link`, such as `rtt_s`.
  """
  site_link = Link(up_bps, down_bps or up_bps, **link)
  sites = [Site(f"site{number}", site_link) for number in range(num_replicas)]
  return Cluster("alike", tuple(sites))


def flat_traffic(
  method: Method, num_parameters: float, num_replicas: int, codec: Codec
) -> Traffic:
  """Returns the byte counter of a run that sends its parameters as one tensor.

  Args:
    method: Method of the run.
    num_parameters: Number of parameters, rounded down.
    num_replicas: Number of replicas, M.
    codec: Codec in which the tensor is sent.
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
  """Returns the simulated time of a single collective (seconds).

  The links were idle before, so TCP starts slowly.

  Args:
    cluster: Cluster in which all replicas take part.
    transport: How a library such as gloo or NCCL sends messages.
    collective: The collective, with the size of its operand.
  """
  no_work_s = np.zeros(cluster.num_replicas)
  # A name of the exchange, which the launch and the wait share.
  key = ("collective", 0, 0, 0)
  ops = [Launch(key, (collective,)), Wait(key)]
  outcome = run_time(
    LinkCosts(cluster, transport), Work(no_work_s, no_work_s), ops
  )
  return outcome.total_s


def pace(
  traffic: Traffic,
  cluster: Cluster,
  step_s: float,
  codec_s: float = 0.0,
  transport: Transport = NCCL,
) -> steps.SteadyState:
  """Simulates a long run, and returns averages per inner step in its middle.

  Args:
    traffic: Counter of the bytes that the run sends, with the run's method,
      codec and shapes of the parameters.
    cluster: Cluster with as many replicas as `traffic`.
    step_s: Duration of an inner step at speed 1 (seconds); a site of speed 0.5
      takes twice as long.
    codec_s: Duration of encoding and decoding in each exchange (seconds).
      Nothing hides it.
    transport: How a library such as gloo or NCCL sends messages.
  """
  interval = traffic.method.schedule.sync_interval
  steps_s = steps.stated_seconds(cluster, step_s)
  work = Work(steps_s, np.full(cluster.num_replicas, codec_s))
  costs = LinkCosts(cluster, transport)
  # The number of steps of the plan does not matter to `steady_state`.
  plan = RunPlan(traffic.method, interval, steps_per_dispatch=1)
  return steps.steady_state(costs, work, Script(traffic), plan)


def least(
  reaches: Callable[[float], bool],
  low: float,
  high: float,
  precision: float = 1e-3,
) -> float:
  """Returns the least value that is enough, or up to `precision` more.

  The search is a bisection on a logarithmic scale. The result is infinity if
  `high` is not enough.

  Args:
    reaches: Function (value) -> whether the value is enough. If a value is
      enough, all larger values must be enough, too.
    low: Lower end of the search, above 0. If it is enough, the result is about
      `low`.
    high: Upper end of the search.
    precision: Largest error that is allowed, as a fraction of the value.
  """
  if not reaches(high):
    return float("inf")
  while high / low > 1 + precision:
    middle = (low * high) ** 0.5
    if reaches(middle):
      high = middle
    else:
      low = middle
  return high
