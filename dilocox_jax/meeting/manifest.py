"""The list of messages that all replicas average in a turn of an event.

A replica with a broken device can send values that are wrong and finite. Its
message is left out if its norm is more than a multiple of what is usual: the
median of the messages of the moment if they are three or more, which follows
the learning rate and is never that of one wrong message. Of two the running
median of the events before is usual, or theirs if it is higher. One that is
alone is compared only when six events are remembered, because its first
messages are of fewer inner steps, or of a learning rate that rises from 0.
"""

import collections
import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.meeting.members import Roster
from dilocox_jax.meeting.messages import Message

KEPT = 6  # Events behind the running median.
ENOUGH = 3  # Messages of which the median is usual by itself.


class Listed(NamedTuple):
  """A message that is averaged.

  Attributes:
    replica: Who sent it.
    digest: Its keyed digest.
    weight: Its weight in the mean.
    norm: Norm of its values, for the rule about messages that are too large.
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

  state: str = ""
  before: str = ""
  listed: tuple[Listed, ...] = ()
  left_out: dict[str, str] = dataclasses.field(default_factory=dict)
  roster: Roster = Roster()

  @property
  def names(self) -> list[str]:
    """The replicas whose messages are averaged, in order."""
    return [each.replica for each in self.listed]

  def digest(self) -> str:
    """Returns a digest of all that the manifest says."""
    text = json.dumps(dataclasses.asdict(self), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> "Manifest":
    """Returns the manifest that `dataclasses.asdict` described."""
    listed = tuple(Listed(*each) for each in values["listed"])
    roster = Roster.from_json(values["roster"])
    return cls(**{**values, "listed": listed, "roster": roster})  # pyright: ignore


def drawn_up(
  sent: Mapping[str, Message],
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
    accepted: Usual norms of the events before, the oldest first.
    max_norm_ratio: See `too_large`.
    roster: Who takes part in the next event.
  """
  states = collections.Counter(each.state for each in sent.values())
  state = states.most_common(1)[0][0] if states else ""
  left_out = {
    name: "its shared state differs"
    for name, each in sent.items()
    if each.state != state
  }
  norms = {
    name: norm_of(each.arrays) if each.weight else math.nan
    for name, each in sent.items()
    if name not in left_out
  }
  left_out |= too_large(norms, accepted, max_norm_ratio)
  listed = tuple(
    Listed(name, each.digest, each.weight, norms[name])
    for name, each in sent.items()
    if name not in left_out
  )
  return Manifest(state, before, listed, left_out, roster)


def norm_of(arrays: Sequence[np.ndarray]) -> float:
  """Returns the Euclidean norm of all floating-point values together."""
  squares = 0.0
  for array in arrays:
    if array.dtype.kind == "V":  # The short floats of `ml_dtypes`.
      array = array.astype(np.float32)
    if array.dtype.kind == "f":
      flat = array.reshape(-1)
      # The sum is in float64, and makes no copy in float64.
      squares += float(np.einsum("i,i->", flat, flat, dtype=np.float64))
  return math.sqrt(squares) if squares >= 0 else math.nan


def too_large(
  norms: Mapping[str, float], accepted: Sequence[float], max_ratio: float
) -> dict[str, str]:
  """Returns the messages to leave out, each with the reason.

  Args:
    norms: Norms of the messages of a turn, by replica.
    accepted: Usual norms of the events before, the oldest first.
    max_ratio: How many times the usual norm a message may have.
  """
  finite = [norm for norm in norms.values() if math.isfinite(norm)]
  usual = [statistics.median_low(finite)] if finite else []
  least = 1 if len(norms) > 1 else KEPT
  if len(finite) < ENOUGH and len(accepted) >= least:
    before = statistics.median_high(accepted[-KEPT:])
    usual = [before, *usual] if len(finite) > 1 else [before]
  limit = max_ratio * max(usual, default=0.0)
  reasons = {}
  for replica, norm in norms.items():
    if not math.isfinite(norm):
      reasons[replica] = "its values are not finite"
    elif norm > limit:
      reasons[replica] = (
        f"its norm {norm:.3g} is over {max_ratio:g} times the usual"
        f" {max(usual):.3g}"
      )
  return reasons
