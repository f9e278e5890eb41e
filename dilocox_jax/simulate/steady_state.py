"""What a round costs once a run is under way, apart from its start and end.

The first exchange of a run meets an idle line, and the flush at the end waits
for everything in flight. A long run repeats the rounds between them. So the
formula's clock walks a few rounds, and the time of as many more is counted.
"""

import dataclasses
import itertools

import numpy as np

from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.simulate.analytic import AnalyticClock
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.outcome import Outcome, Work
from dilocox_jax.simulate.script import Script

_FIRST_ROUNDS, _COUNTED_ROUNDS = 4, 4
_DRAWN_ROUNDS = 100  # Counted where replicas are away by chance.


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

  Outages, and absences from given rounds to others, have their own times in a
  run, so they are left out. Absences by chance are averaged over many rounds.

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
  cluster = dataclasses.replace(link_costs.cluster, outages=())
  costs = dataclasses.replace(link_costs, cluster=cluster)
  clock = AnalyticClock(costs, work)
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
