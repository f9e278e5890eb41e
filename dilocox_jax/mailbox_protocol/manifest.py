"""The list of messages that all replicas average in a turn of an event.

A replica with a broken device can send values that are wrong and finite. The
norm of its message shows it, beside the *usual* norm:

- of three messages or more their median, which follows the learning rate and is
  never the norm of one wrong message;
- of two the lower one, or the running median of the events before if that is
  higher;
- of one alone the running median, once six events are remembered. Its first
  messages are of fewer inner steps, or of a learning rate that rises from 0.

Messages of replicas that made no progress have a norm of 0. They do not count
toward the usual norm.

A message over `max_norm_ratio` times the usual norm is left out. A smaller one
that is still r > 1 times the usual norm keeps its place with a smaller weight,
1 / r^2 of its own. So the influence of a wrong message falls as its size grows,
where a mean with equal weights would diverge: of three replicas of which one
sends its values times -2, the mean is (1 + 1 - 2 / 4) / (2 + 1 / 4) = 0.67 of
what it should be, instead of 0. Of two messages nobody knows which one is
wrong. There the weight is 1 / r, so that neither has more influence than the
other: at worst they cancel, and the run stands still until somebody looks.
"""

import collections
import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.mailbox_protocol.messages import Message
from dilocox_jax.mailbox_protocol.roster import Roster

KEPT = 6  # Events behind the running median.
ENOUGH = 3  # Messages of which the median is usual by itself.


class Listed(NamedTuple):
  """A message that is averaged.

  Attributes:
    replica: Who sent it.
    digest: Its keyed digest.
    weight: Its weight in the mean, which may be lower than its sender wrote.
    norm: Norm of its values.
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


def make_manifest(
  sent: Mapping[str, Message],
  *,
  before: str,
  accepted: Sequence[float],
  max_norm_ratio: float,
  roster: Roster,
  full_weight_ratio: float = 1.0,
) -> Manifest:
  """Returns the manifest for the messages that have arrived.

  Messages are averaged if their senders have the shared state that most
  replicas have. Of two states that are as frequent, that of the earlier seat
  counts. Messages that are too large are left out, and large ones get a lower
  weight (see the module).

  Args:
    sent: The messages by replica, in the order of seats.
    before: Digest of the manifest before.
    accepted: Usual norms of the events before, the oldest first.
    max_norm_ratio: How many times the usual norm a message may have.
    roster: Who takes part in the next event.
    full_weight_ratio: How many times the usual norm a message may have and
      still keep its full weight.
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
  averaged = {
    name: norm for name, norm in norms.items() if name not in left_out
  }
  factors = weight_factors(averaged, accepted, full_weight_ratio)
  listed = tuple(
    Listed(
      replica=name,
      digest=sent[name].digest,
      weight=sent[name].weight * factors[name],
      norm=norm,
    )
    for name, norm in averaged.items()
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


def usual_norm(
  norms: Iterable[float], accepted: Sequence[float]
) -> float | None:
  """Returns the usual norm of messages; None if nothing is known of it.

  Args:
    norms: Norms of the messages of a turn. Those that are 0 or not finite do
      not count.
    accepted: Usual norms of the events before, the oldest first.
  """
  counted = [norm for norm in norms if math.isfinite(norm) and norm > 0]
  if len(counted) >= ENOUGH:
    return statistics.median_low(counted)
  before = [norm for norm in accepted[-KEPT:] if norm > 0]
  if len(counted) == 1:
    return statistics.median_high(before) if len(before) == KEPT else None
  if not counted:
    return None
  lower = min(counted)
  return max(lower, statistics.median_high(before)) if before else lower


def too_large(
  norms: Mapping[str, float], accepted: Sequence[float], max_ratio: float
) -> dict[str, str]:
  """Returns the messages to leave out, each with the reason.

  Args:
    norms: Norms of the messages of a turn, by replica.
    accepted: Usual norms of the events before, the oldest first.
    max_ratio: How many times the usual norm a message may have.
  """
  usual = usual_norm(norms.values(), accepted)
  reasons = {}
  for replica, norm in norms.items():
    if not math.isfinite(norm):
      reasons[replica] = "its values are not finite"
    elif usual is not None and norm > max_ratio * usual:
      reasons[replica] = (
        f"its norm {norm:.3g} is over {max_ratio:g} times the usual {usual:.3g}"
      )
  return reasons


def weight_factors(
  norms: Mapping[str, float], accepted: Sequence[float], full_ratio: float
) -> dict[str, float]:
  """Returns the factor of each message's weight, 1 or less.

  Args:
    norms: Norms of the messages that are averaged, by replica.
    accepted: Usual norms of the events before, the oldest first.
    full_ratio: How many times the usual norm a message may have and still keep
      its full weight.
  """
  usual = usual_norm(norms.values(), accepted)
  if usual is None:
    return dict.fromkeys(norms, 1.0)
  num_counted = sum(norm > 0 for norm in norms.values())
  power = 2 if num_counted >= ENOUGH else 1
  limit = full_ratio * usual
  return {
    replica: min(1.0, (limit / norm) ** power) if norm else 1.0
    for replica, norm in norms.items()
  }
