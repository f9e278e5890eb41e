"""Time of an inner step: alone, and with the exchanges of a long run.

A step takes its operations (FLOP) divided by what the devices achieve (FLOP/s).
Pipeline stages make it longer by the bubble, which is computed from the same
lists of ticks that a pipelined step executes.

The first and the last rounds of a run are different: the first exchange meets
an idle line, and the flush at the end waits for everything in flight. To know
the time of the rounds between them, the clock walks through a few rounds and
then counts the time of a few more.
"""

import dataclasses
import itertools

import numpy as np

from dilocox_jax.plan.pipeline import Pipeline, timeline
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.simulate.analytic import AnalyticClock, Outcome, Work
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.script import Script

_FIRST_ROUNDS = 4
_COUNTED_ROUNDS = 4
_DRAWN_ROUNDS = 100  # Counted where replicas are away by chance.


def stated_seconds(cluster: Cluster, step_s: float | int) -> np.ndarray:
  """Returns step times from a known duration; slow sites take longer.

  Args:
    cluster: Sites and their speeds.
    step_s: Duration of a step at speed 1 (seconds).

  Returns:
    Duration of one step for each replica, [M] (seconds).
  """
  replicas = range(cluster.num_replicas)
  return step_s / np.array([cluster.site(r).speed for r in replicas])


def step_seconds(
  cluster: Cluster,
  step_flops: float | int,
  pipeline: Pipeline | None = None,
  hop_bytes: float = 0.0,
  num_used: int | None = None,
) -> tuple[np.ndarray, float]:
  """Computes step times from the operations of a step.

  Every stage has an equal share of the work. A backward pass costs twice as
  much as a forward pass, so of every 3 seconds 1 is forward. Activations are
  sent at the rate inside the site, while the next micro-batch is computed.

  Args:
    cluster: Sites and their devices.
    step_flops: Operations of one replica's step (FLOP).
    pipeline: Pipeline inside a replica; None: no stages, no bubble.
    hop_bytes: Bytes of activations that a micro-batch sends between stages.
    num_used: Number of devices of a replica that compute while its others are
      idle; None: all of them.

  Returns:
    Duration of one step for each replica, [M] (seconds), and the share of a
    step in which a stage has nothing to do.

  Raises:
    ValueError: If a replica has fewer devices than stages.
  """
  replicas = range(cluster.num_replicas)
  shares = [(num_used or n) / n for n in map(cluster.num_devices, replicas)]
  busy_s = [
    step_flops / cluster.replica_flops(r) / min(share, 1.0)
    for r, share in zip(replicas, shares, strict=True)
  ]
  if pipeline is None:
    return np.array(busy_s), 0.0
  lines = []
  for replica, seconds in zip(replicas, busy_s, strict=True):
    devices = cluster.num_devices(replica)
    if devices < pipeline.num_stages:
      raise ValueError(
        f"num_stages={pipeline.num_stages} must be at most the {devices} "
        f"devices of a replica at site {cluster.site(replica).name!r}"
      )
    micro_batch_s = seconds / pipeline.num_micro_batches
    hop_s = 8 * hop_bytes / cluster.site(replica).intra_bps
    works_s = micro_batch_s / 3, 2 * micro_batch_s / 3
    lines.append(timeline(pipeline, *works_s, hop_s))
  bubbles = [line.bubble_fraction for line in lines]
  return np.array([line.step_s for line in lines]), float(np.mean(bubbles))


@dataclasses.dataclass(frozen=True)
class SteadyState:
  """Averages over rounds in the middle of a long run.

  Attributes:
    step_s: Time of an inner step with all that it waits for (seconds).
    compute_s: Time of an inner step alone, mean over replicas (seconds).
    exposed_s: Waiting for exchanges a step, mean over replicas (seconds).
    exchange_s: Time a step in which the line is busy (seconds), that of the
      replica with the shortest exchanges. This replica waits for bytes alone,
      and the others wait for slower replicas too.
    slowest_s: Time of an inner step of the slowest replica alone (seconds).
    sent_bytes: Bytes that one replica sends a step.
    replica_steps: Inner steps that all replicas together take a step: their
      number M, or less where some take fewer steps a round or are away.
  """

  step_s: float
  compute_s: float
  exposed_s: float
  exchange_s: float
  slowest_s: float
  sent_bytes: float
  replica_steps: float

  @property
  def utilization(self) -> float:
    """Share of the time that replicas spend in inner steps, 0 to 1."""
    return self.compute_s / self.step_s if self.step_s else 1.0

  def hiding_interval(self, sync_interval: int) -> int:
    """Returns the least H whose exchanges take no longer than its steps.

    A schedule whose overlap is shorter than a round needs a larger H.

    Example: at H = 30 the line is busy for 0.5 s of every step of 1 s. So 15
    steps take as long as the exchanges of a round.

    Args:
      sync_interval: H of the run (inner steps).
    """
    if not self.slowest_s:
      return sync_interval
    share = self.exchange_s / self.slowest_s
    return max(int(np.ceil(sync_interval * share * (1 - 1e-9))), 1)


def steady_state(
  link_costs: LinkCosts, work: Work, script: Script, plan: RunPlan
) -> SteadyState:
  """Computes the costs of rounds in the middle of a long run.

  Planned absences (`Membership.absences`) are left out, because they change
  only the rounds that they name. Absences by chance are averaged over many
  rounds.

  Args:
    link_costs: Cluster and transport.
    work: Seconds of a replica's own work.
    script: Turns segments into ops.
    plan: Segments of the run, whose length does not matter.
  """
  method = plan.method
  first = 0 if method.exchanged == "gradient" else plan.warm_start_steps
  # A result may be applied many rounds after it was sent.
  num_first = method.schedule.depth + _FIRST_ROUNDS
  members = plan.membership
  num_counted = _COUNTED_ROUNDS
  if members:
    members = dataclasses.replace(members, absences=())
    num_counted = _DRAWN_ROUNDS if members.absence_rate else num_counted
  num_rounds = num_first + num_counted
  longest = max(method.schedule.sync_interval, plan.steps_per_dispatch)
  total_steps = first + num_rounds * longest
  long = dataclasses.replace(plan, total_steps=total_steps, membership=members)
  clock = AnalyticClock(link_costs, work)
  segments = list(itertools.islice(long.segments(first), num_rounds))
  walked = [clock.walk(script.segment(segment)) for segment in segments]
  replica_steps = sum(
    segment.replica_steps(len(work.step_s)) for segment in segments[num_first:]
  )
  return _between(walked[num_first - 1], walked[-1], replica_steps)


def _between(first: Outcome, last: Outcome, replica_steps: int) -> SteadyState:
  """Returns the averages of the rounds between two outcomes of one run."""
  num_steps = last.num_steps - first.num_steps

  def a_step(name: str) -> np.ndarray:
    """Returns the change of a field for every inner step."""
    return (getattr(last, name) - getattr(first, name)) / num_steps

  return SteadyState(
    step_s=(last.now_s - first.now_s) / num_steps,
    compute_s=float(np.mean(a_step("compute_s"))),
    exposed_s=float(np.mean(a_step("exposed_s"))),
    exchange_s=float(np.min(a_step("exchange_s"))),
    slowest_s=float(np.max(a_step("compute_s"))),
    sent_bytes=(last.sent_bytes - first.sent_bytes) / num_steps,
    replica_steps=replica_steps / num_steps,
  )
