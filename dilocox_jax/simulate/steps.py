"""Time of an inner step: alone, and with the exchanges of a long run.

A step takes its operations divided by what the devices achieve. Pipeline
stages make it longer by the bubble, which is computed from the same lists of
ticks that a pipelined step executes.

The first exchange of a run meets an idle line, and the flush at the end waits
for everything in flight. A long run repeats the rounds between them. So the
formula's clock walks a few rounds, and the time of as many more is counted.
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

_FIRST_ROUNDS, _COUNTED_ROUNDS = 4, 4
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
  """Computes step times from operations.

  Every stage has an equal share of the work. A backward pass costs twice as
  much as a forward pass, so of every 3 seconds 1 is forward. Activations are
  sent at the rate inside the site, while the next micro-batch is computed.

  Args:
    cluster: Sites and their devices.
    step_flops: Operations of one replica's step (FLOP).
    pipeline: Pipeline inside a replica; None: no stages, no bubble.
    hop_bytes: Bytes of activations that a micro-batch sends between stages.
    num_used: Devices of a replica that compute, the others being idle; None:
      all of them.

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
    exchange_s: Time in which the line is busy a step (seconds). It is that of
      the replica with the shortest exchanges, which waits for bytes alone.
      Others wait for slower replicas too.
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
  def utilisation(self) -> float:
    """Share of the time that replicas spend in inner steps, 0 to 1."""
    return self.compute_s / self.step_s if self.step_s else 1.0

  def hiding_interval(self, sync_interval: int) -> int:
    """Returns the least H whose exchanges take no longer than its steps.

    It counts bytes and messages alone: a schedule whose overlap is shorter
    than a round needs more. Example: at H = 30 the line is busy 0.5 s of every
    step of 1 s, so 15 steps take as long as the exchanges of a round.

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
  """Computes the costs of rounds in the middle of a run that is long enough.

  Absences from given rounds to others have their own times in a run, so they
  are left out. Absences by chance are averaged over many rounds.

  Args:
    link_costs: Cluster and transport.
    work: Seconds of a replica's own work.
    script: Turns segments into ops.
    plan: Segments of the run, whose length does not matter.
  """
  method = plan.method
  first = 0 if method.exchanged == "gradient" else plan.warm_start_steps
  # What is sent may be applied many rounds later.
  num_first = method.schedule.depth + _FIRST_ROUNDS
  members, num_counted = plan.membership, _COUNTED_ROUNDS
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


def _between(begun: Outcome, done: Outcome, replica_steps: int) -> SteadyState:
  num_steps = done.num_steps - begun.num_steps

  def spent(name: str) -> np.ndarray:
    return (getattr(done, name) - getattr(begun, name)) / num_steps

  return SteadyState(
    step_s=(done.now_s - begun.now_s) / num_steps,
    compute_s=float(np.mean(spent("compute_s"))),
    exposed_s=float(np.mean(spent("exposed_s"))),
    exchange_s=float(np.min(spent("exchange_s"))),
    slowest_s=float(np.max(spent("compute_s"))),
    sent_bytes=(done.sent_bytes - begun.sent_bytes) / num_steps,
    replica_steps=replica_steps / num_steps,
  )
