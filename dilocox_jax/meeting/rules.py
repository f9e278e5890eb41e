"""The rules of an exchange through a store, equal in all replicas of a run."""

import dataclasses

from dilocox_jax.checks import check_limits, limited


@dataclasses.dataclass(frozen=True)
class MailboxRules:
  """When a round is settled, and what is left out.

  Attributes:
    replicas: Replicas that the first event waits for, up to the grace time.
    quorum: Messages without which no event is settled.
    grace_s: Seconds that a replica waits for those who are expected.
    snapshot_every: Events between two snapshots of the shared state.
    max_norm_ratio: How many times the usual norm a message may have.
  """

  replicas: int = limited(2, at_least=1)
  quorum: int = limited(1, at_least=1)
  grace_s: float = limited(60.0, above=0)
  snapshot_every: int = limited(64, at_least=1)
  max_norm_ratio: float = limited(5.0, above=1)

  def __post_init__(self):
    check_limits(self, "meet.")
