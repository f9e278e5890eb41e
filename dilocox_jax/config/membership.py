"""The section of a run's config about replicas that are away or slow."""

import dataclasses

from dilocox_jax.checks import in_front, limited
from dilocox_jax.config.sections import Section
from dilocox_jax.plan.schedule import membership
from dilocox_jax.plan.schedule.methods import Method


@dataclasses.dataclass(frozen=True)
class MembershipConfig(Section):
  """Replicas that are away for some rounds, or slower than others."""

  # E.g. "1:3-5;0:8": replica 1 in the rounds 3 to 5, and 0 in round 8 (from 0).
  absences: str = ""
  # Chance of a replica to be away in a round; drawn from the seed.
  absence_rate: float = limited(0.0, at_least=0, below=1)
  # Inner steps of each replica in a round, e.g. "32,16"; "": H for all.
  inner_steps: str = ""

  def plan(
    self, method: Method, num_replicas: int, seed: int, joined: tuple = ()
  ) -> membership.Membership:
    """Returns all replicas' rounds and pace; `joined` are more absences.

    Args:
      method: Method of the run, whose schedule has the rounds.
      num_replicas: M.
      seed: Seed of the chances to be away.
      joined: More absences, triples (replica, first round, last round).
    """
    with in_front("membership."):
      return membership.Membership(
        method.schedule,
        num_replicas,
        membership.named_absences(self.absences) + joined,
        self.absence_rate,
        seed,
        membership.named_inner_steps(self.inner_steps),
      )
