"""Computes the time of an inner step, alone and with exchanges.

Alone, a step takes its operations (FLOP) divided by the rate of the devices
(FLOP/s). To this come the waits inside a replica, such as the *bubble*: the
time in which a pipeline stage has nothing to do. With exchanges, the time of a
step is an average over rounds in the middle of a long run, because the first
rounds and the end are different.
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

_FIRST_ROUNDS = 4  # Rounds at the start that do not count.
_COUNTED_ROUNDS = 4
_DRAWN_ROUNDS = 100  # Rounds that count if replicas are away by chance.


def stated_seconds(cluster: Cluster, step_s: float | int) -> np.ndarray:
  """Returns the step time of each replica (seconds), [M].

  It is `step_s` divided by the speed of the replica's site.
  """
  replicas = range(cluster.num_replicas)
  return step_s / np.array([cluster.site(r).speed for r in replicas])


def step_seconds(
  cluster: Cluster,
  step_flops: float | int,
  pipeline: Pipeline | None = None,
  hop_bytes: float = 0.0,
  num_used: int | None = None,
  inner_bytes: float = 0.0,
) -> tuple[np.ndarray, float]:
  """Computes the step time of each replica from the operations of a step.

  It assumes that stages share the work evenly, and that a backward pass takes
  twice as long as a forward pass. Activations of one micro-batch are sent while
  the next is computed. Devices wait for `inner_bytes`.

  Args:
    cluster: Sites, their devices, and the rates inside the sites.
    step_flops: Operations of one replica's step (FLOP).
    pipeline: Pipeline inside a replica; None: no stages, so no bubble.
    hop_bytes: Activations of a micro-batch that a stage sends to the next one
      (bytes).
    num_used: Number of a replica's devices that compute; None: all of them.
    inner_bytes: Bytes that a device receives in a step from other devices of
      its replica, and for which it waits.

  Returns:
    Duration of one step for each replica, [M] (seconds), and the bubble as a
    share of a step (0 to 1, mean over replicas).

  Raises:
    ValueError: If a replica has fewer devices than stages.
  """
  replicas = range(cluster.num_replicas)
  busy_s = []
  for replica in replicas:
    num_devices = cluster.num_devices(replica)
    # Example: if 6 of 8 devices compute, they take 8 / 6 of the time.
    used_share = min((num_used or num_devices) / num_devices, 1.0)
    compute_s = step_flops / cluster.replica_flops(replica) / used_share
    wait_s = 8 * inner_bytes / cluster.site(replica).intra_bps
    busy_s.append(compute_s + wait_s)
  if pipeline is None:
    return np.array(busy_s), 0.0
  timelines = []
  for replica, replica_busy_s in zip(replicas, busy_s, strict=True):
    num_devices = cluster.num_devices(replica)
    if num_devices < pipeline.num_stages:
      raise ValueError(
        f"num_stages={pipeline.num_stages} must be at most the {num_devices} "
        f"devices of a replica at site {cluster.site(replica).name!r}"
      )
    micro_batch_s = replica_busy_s / pipeline.num_micro_batches
    # A backward pass takes twice as long as a forward pass.
    timelines.append(
      timeline(
        pipeline,
        forward_s=micro_batch_s / 3,
        backward_s=2 * micro_batch_s / 3,
        hop_s=8 * hop_bytes / cluster.site(replica).intra_bps,
      )
    )
  step_s = np.array([entry.step_s for entry in timelines])
  bubbles = [entry.bubble_fraction for entry in timelines]
  return step_s, float(np.mean(bubbles))


@dataclasses.dataclass(frozen=True)
class SteadyState:
  """Averages per inner step, over rounds in the middle of a long run.

  Attributes:
    step_s: Time from one inner step to the next, with all waiting (seconds).
    compute_s: Time that a replica computes, mean over replicas (seconds).
    exposed_s: Time that a replica waits for exchanges, mean over replicas
      (seconds).
    exchange_s: Time of exchanges for the replica whose exchanges are shortest
      (seconds). Other replicas' exchanges include waits for slower replicas.
    slowest_s: Time that the slowest replica computes (seconds).
    sent_bytes: Bytes that one replica sends.
    replica_steps: Inner steps that all replicas together take: M, or less if
      some replicas take fewer steps a round or are away.
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
    """Share of the time that replicas spend in inner steps, 0 to 1.

    It is 1 if a step takes no time.
    """
    return self.compute_s / self.step_s if self.step_s else 1.0

  def hiding_interval(self, sync_interval: int) -> int:
    """Returns the least H whose inner steps can hide a round's exchanges.

    The exchanges of a round then take no longer than H inner steps of the
    slowest replica. If inner steps take no time, `sync_interval` is returned.

    Example: at H = 30 exchanges take 0.5 s for every inner step of 1 s. So 15
    steps take as long as the exchanges of a round.

    Args:
      sync_interval: H of the run that was simulated (inner steps).
    """
    if not self.slowest_s:
      return sync_interval
    share = self.exchange_s / self.slowest_s
    # Rounding errors must not add a step.
    return max(int(np.ceil(sync_interval * share * (1 - 1e-9))), 1)


def steady_state(
  link_costs: LinkCosts, work: Work, script: Script, plan: RunPlan
) -> SteadyState:
  """Computes averages per inner step from the middle of a long run.

  Planned absences (`Membership.absences`) and a warm start are left out.
  Absences by chance are averaged over 100 rounds.

  Args:
    link_costs: Cluster and transport.
    work: Durations of the replicas' work without the network (seconds).
    script: Turns the plan into inner steps, exchanges and waits.
    plan: Plan of the run. The length of the run does not matter.
  """
  method = plan.method
  # The clock begins at this inner step of the run.
  start = 0
  if method.exchanged != "gradient":
    start = plan.warm_start_steps
    # Rounds that still grow are shorter than those in the middle of a long run.
    if method.schedule.steady_round:
      start += method.schedule.steady_step
  # After `depth` rounds, results of earlier rounds arrive in every round.
  num_first = method.schedule.depth + _FIRST_ROUNDS
  membership = plan.membership
  num_counted = _COUNTED_ROUNDS
  if membership:
    membership = dataclasses.replace(membership, absences=())
    if membership.absence_rate:
      num_counted = _DRAWN_ROUNDS
  num_rounds = num_first + num_counted
  # The run is made long enough for all these rounds.
  most_steps = max(method.schedule.sync_interval, plan.steps_per_dispatch)
  long_plan = dataclasses.replace(
    plan,
    total_steps=start + num_rounds * most_steps,
    membership=membership,
  )
  clock = AnalyticClock(link_costs, work)
  segments = list(itertools.islice(long_plan.segments(start), num_rounds))
  outcomes = [clock.walk(script.segment(segment)) for segment in segments]
  replica_steps = sum(
    segment.replica_steps(len(work.step_s)) for segment in segments[num_first:]
  )
  return _averages_between(
    outcomes[num_first - 1], outcomes[-1], replica_steps=replica_steps
  )


def _averages_between(
  first: Outcome, last: Outcome, replica_steps: int
) -> SteadyState:
  """Computes averages per inner step over the rounds between two outcomes.

  `replica_steps` is the inner steps of all replicas together in the rounds.
  """
  num_steps = last.num_steps - first.num_steps

  def per_step(name: str) -> np.ndarray:
    """Returns the increase of a field of `Outcome` per inner step, [M]."""
    return (getattr(last, name) - getattr(first, name)) / num_steps

  return SteadyState(
    step_s=(last.now_s - first.now_s) / num_steps,
    compute_s=float(np.mean(per_step("compute_s"))),
    exposed_s=float(np.mean(per_step("exposed_s"))),
    exchange_s=float(np.min(per_step("exchange_s"))),
    slowest_s=float(np.max(per_step("compute_s"))),
    sent_bytes=(last.sent_bytes - first.sent_bytes) / num_steps,
    replica_steps=replica_steps / num_steps,
  )
