"""The list of messages that all replicas average in a turn of an event."""

import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dilocox_jax.meeting.norms import too_large
from dilocox_jax.meeting.roster import Roster
from dilocox_jax.meeting.seal import sha256_hex


class Listed(NamedTuple):
  """A message that is averaged.

  Attributes:
    replica: Who sent it.
    digest: Its keyed digest.
    weight: Its weight in the mean.
    norm: NormOf of its values, for the rule about messages that are too large.
  """

  replica: str
  digest: str
  weight: float
  norm: float


@dataclasses.dataclass(frozen=True)
class Manifest:
  """What one replica wrote, once, and all follow.

  Attributes:
    state: Digest of the shared state that the listed messages belong to.
    before: Digest of the manifest before this one. So two replicas with
      different lists cannot go on together.
    listed: What is averaged, in this order.
    left_out: Messages that were there and are not averaged, with the reason.
    roster: Who takes part in the next event.
  """

  state: str
  before: str
  listed: tuple[Listed, ...]
  left_out: dict[str, str]
  roster: Roster

  def to_json(self) -> dict[str, Any]:
    """Returns the manifest as values of JSON."""
    return dataclasses.asdict(self)

  def digest(self) -> str:
    """Returns a digest of all that the manifest says."""
    return sha256_hex(json.dumps(self.to_json(), sort_keys=True).encode())

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> "Manifest":
    """Returns the manifest that `to_json` described."""
    return cls(
      state=values["state"],
      before=values["before"],
      listed=tuple(Listed(*each) for each in values["listed"]),
      left_out=dict(values["left_out"]),
      roster=roster_from_json(values["roster"]),
    )


def roster_from_json(values: Mapping[str, Any]) -> Roster:
  """Returns the roster that `dataclasses.asdict` described."""
  return Roster(tuple(values["seats"]), dict(values["away"]))


class Sent(NamedTuple):
  """A message as whoever writes the manifest sees it.

  Attributes:
    digest: Its keyed digest.
    state: The sender's digest of the shared state.
    weight: Its weight in the mean.
    norm: NormOf of its values.
  """

  digest: str
  state: str
  weight: float
  norm: float


def drawn_up(
  sent: Mapping[str, Sent],
  *,
  before: str,
  accepted: Sequence[float],
  max_norm_ratio: float,
  roster: Roster,
) -> Manifest:
  """Returns the manifest for the messages that have arrived.

  Averaged are those whose senders have the shared state that most have; of two
  that are as frequent, the one of the earlier seat counts. Of these, messages
  that are too large are left out.

  Args:
    sent: The messages by replica, in the order of seats.
    before: Digest of the manifest before.
    accepted: Norms of accepted messages of this kind, the oldest first.
    max_norm_ratio: See `norms.too_large`.
    roster: Who takes part in the next event.
  """
  states = collections.Counter(each.state for each in sent.values())
  state = states.most_common(1)[0][0] if states else ""
  left_out = {
    name: "its shared state differs"
    for name, each in sent.items()
    if each.state != state
  }
  norms = {n: each.norm for n, each in sent.items() if n not in left_out}
  left_out |= too_large(norms, accepted, max_norm_ratio)
  listed = tuple(
    Listed(name, each.digest, each.weight, each.norm)
    for name, each in sent.items()
    if name not in left_out
  )
  return Manifest(state, before, listed, left_out, roster)
