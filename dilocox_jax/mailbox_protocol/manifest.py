"""The list of messages that all replicas average in a turn of an event.

A replica with a broken device can send values that are finite and wrong. Then
the norm of its message often differs from the *usual* norm:

- For three or more messages, the usual norm is their median. The median follows
  the learning rate, and one wrong message never decides it.
- For two messages, it is the lower norm, or the running median of earlier
  events if that is higher.
- For a single message, it is the running median, once six events are
  remembered. Before that there is no usual norm, because the first messages
  have fewer inner steps, or a learning rate that rises from 0.

Messages of replicas that made no progress have a norm of 0. They do not count
toward the usual norm.

A message with more than `max_norm_ratio` times the usual norm is left out. A
smaller message, whose norm is r > 1 times the usual norm, is averaged with less
weight: 1 / r^2 of its own weight. So the influence of a wrong message falls as
its size grows, where a mean with equal weights would diverge. For example, one
of three replicas sends its values times -2. The mean is then
(1 + 1 - 2 / 4) / (2 + 1 / 4) = 0.67 of the right one, instead of 0.

Of two messages nobody knows which one is wrong. So their weight is 1 / r, and
neither has more influence than the other. At worst the two cancel, and the run
makes no progress until somebody looks at it.
"""

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
from dilocox_jax.mailbox_protocol.votes import Vote

NUM_REMEMBERED = 6  # Events of the running median.
ENOUGH = 3  # So many messages need no running median.


class Listed(NamedTuple):
  """A message that is averaged.

  Attributes:
    replica: Name of its sender.
    digest: Signature of the message, in hexadecimal digits.
    weight: Weight in the mean. It may be lower than the sender wrote.
    norm: Norm of the values.
  """

  replica: str
  digest: str
  weight: float
  norm: float


@dataclasses.dataclass(frozen=True)
class Manifest:
  """The agreement on a turn. One replica writes it once, and all follow it.

  Attributes:
    before: Digest of the manifest before this one. It is the name of the shared
      state that the messages belong to. So two replicas with different lists
      cannot go on together.
    listed: The messages that are averaged, in this order.
    left_out: Reasons why messages that were there are not averaged, by replica.
    roster: The replicas that take part in the next event.
    begins_interval: Whether a snapshot of the state before this event is due.
      Then an interval of events begins, which are deleted together
      (`store_size`).
    is_split: Whether the shared states of the senders differ and none is more
      frequent than the others (`votes`). All senders then take the newest
      snapshot.
    num_slices: Number of slices into which the messages are cut, S, if the mean
      is made in shares; 0: each replica averages the messages itself.
  """

  before: str = ""
  listed: tuple[Listed, ...] = ()
  left_out: dict[str, str] = dataclasses.field(default_factory=dict)
  roster: Roster = Roster()
  is_split: bool = False
  begins_interval: bool = False
  num_slices: int = 0

  @property
  def num_bytes(self) -> int:
    """Bytes of the manifest and its proposal in a store, without their tags."""
    return 2 * len(self._text())

  @property
  def names(self) -> list[str]:
    """The replicas whose messages are averaged, in order."""
    return [message.replica for message in self.listed]

  def digest(self) -> str:
    """Returns a digest of the whole manifest."""
    return hashlib.sha256(self._text().encode()).hexdigest()

  def _text(self) -> str:
    """Returns the manifest as JSON."""
    return json.dumps(dataclasses.asdict(self), sort_keys=True)

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> "Manifest":
    """Returns the manifest of which `values` are the `dataclasses.asdict`."""
    listed = tuple(Listed(*fields) for fields in values["listed"])
    roster = Roster.from_json(values["roster"])
    fields = {**values, "listed": listed, "roster": roster}
    return cls(**fields)  # pyright: ignore


def make_manifest(
  sent: Mapping[str, Message],
  *,
  before: str,
  accepted: Sequence[float],
  max_norm_ratio: float,
  roster: Roster,
  states: Vote = Vote({}),  # noqa: B008 - nobody changes it
  full_weight_ratio: float = 1.0,
) -> Manifest:
  """Returns the manifest for the messages that have arrived.

  Messages are left out if their senders have another shared state (`votes`), or
  if they are too large. Large ones get a lower weight (see the module).

  Args:
    sent: The messages by replica, in the order of seats.
    before: Digest of the manifest before this one.
    accepted: Usual norms of the earlier events, the oldest first.
    max_norm_ratio: How many times the usual norm a message may have.
    roster: The replicas that take part in the next event.
    states: Which messages belong to another state.
    full_weight_ratio: How many times the usual norm a message may have and
      still keep its full weight.
  """
  left_out = dict(states.left_out)
  norms = {}
  for name, message in sent.items():
    if name in left_out:
      continue
    if message.weight == 0:
      norms[name] = math.nan  # The sender's values are not finite.
    elif message.norm is not None:
      norms[name] = message.norm
    else:
      norms[name] = norm_of(message.arrays)
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
  return Manifest(
    before=before,
    listed=listed,
    left_out=left_out,
    roster=roster,
    is_split=states.is_split,
  )


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
  """Returns the usual norm of messages; None if it is not known.

  Args:
    norms: Norms of the messages of a turn. Norms that are 0 or not finite do
      not count.
    accepted: Usual norms of the earlier events, the oldest first.
  """
  counted = [norm for norm in norms if math.isfinite(norm) and norm > 0]
  if not counted:
    return None
  if len(counted) >= ENOUGH:
    return statistics.median_low(counted)
  earlier = [norm for norm in accepted[-NUM_REMEMBERED:] if norm > 0]
  if len(counted) == 1:
    if len(earlier) < NUM_REMEMBERED:
      return None
    return statistics.median_high(earlier)
  if not earlier:
    return min(counted)
  return max(min(counted), statistics.median_high(earlier))


def too_large(
  norms: Mapping[str, float], accepted: Sequence[float], max_ratio: float
) -> dict[str, str]:
  """Returns why messages are left out, by replica.

  Args:
    norms: Norms of the messages of a turn, by replica.
    accepted: Usual norms of the earlier events, the oldest first.
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
  """Returns the factor of each message's weight, at most 1, by replica.

  Args:
    norms: Norms of the messages that are averaged, by replica.
    accepted: Usual norms of the earlier events, the oldest first.
    full_ratio: How many times the usual norm a message may have and still keep
      its full weight.
  """
  usual = usual_norm(norms.values(), accepted)
  if usual is None:
    return dict.fromkeys(norms, 1.0)
  num_counted = sum(norm > 0 for norm in norms.values())
  power = 2 if num_counted >= ENOUGH else 1
  limit = full_ratio * usual
  factors = {}
  for replica, norm in norms.items():
    if norm > 0:
      factors[replica] = min(1.0, (limit / norm) ** power)
    else:
      factors[replica] = 1.0
  return factors
