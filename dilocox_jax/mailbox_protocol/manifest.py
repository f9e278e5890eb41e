"""Makes manifests: lists of the messages that all replicas average.

A turn of an exchange (one message of each replica) has a manifest. A message is
left out of it for one of three reasons: its sender's shared state is refused
(`votes`), its values are not finite, or its norm is too large.

The norm is compared with the *usual* norm, which is the median norm if there
are at least three messages (else see `usual_norm`). If the norm is more than
`max_norm_ratio` times the usual norm, the message is left out. If it is r times
the usual norm, and r is between 1 and `max_norm_ratio`, the message's weight is
multiplied by 1/r^2. (If `full_weight_ratio` is f, r is relative to f times the
usual norm.) For example, one of three replicas sends its values times -2. Then
r is 2, and the mean is (1 + 1 - 2/4) / (1 + 1 + 1/4) = 0.67 of the right one,
instead of 0.

If there are fewer than three messages, nobody knows which one is wrong. Then
the weight is multiplied by 1/r only: the message has no more influence than one
with the usual norm. Messages with the norm 0 do not count here.
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

NUM_REMEMBERED = 6  # The running median is over so many events.
ENOUGH = 3  # With so many messages, the running median is not needed.


class Listed(NamedTuple):
  """An entry of a manifest: a message that is averaged.

  Attributes:
    replica: Name of the message's sender.
    digest: First 32 bytes of the message, which sign it, as hexadecimal digits.
    weight: Weight of the message in the mean: the weight that its sender gave,
      reduced if the norm is large.
    norm: Euclidean norm of the message: `norm_of`, or the norm that the sender
      declared if messages are cut into slices (`Message.norm`).
  """

  replica: str
  digest: str
  weight: float
  norm: float


@dataclasses.dataclass(frozen=True)
class Manifest:
  """The agreement on a turn: which messages all replicas average.

  In a turn, each replica sends one message. One replica writes the manifest
  once, and all follow it.

  Attributes:
    before: Digest of the newest manifest that all listed senders have followed,
      in hexadecimal digits; "" in the first turn of event (exchange) 0. Only
      manifests of first turns count.
    listed: The messages that are averaged, in this order.
    left_out: For each replica whose message came in time and is not averaged,
      the reason, e.g. "its values are not finite".
    roster: The replicas that take part after this event.
    is_split: Whether several shared states (outer parameters, outer optimizer
      and the codec's common state) tied for the most frequent one among the
      senders (`votes`). All senders must then begin again from the newest
      snapshot (copy of a state).
    begins_interval: Whether a snapshot of the state before this event is due.
      Then a new interval begins: events that will be deleted together.
    num_slices: Number of slices, S, into which the messages are cut, so that
      each replica averages one of them; 0: they are not cut.
    layout: Digest of types and shapes of the messages (`Inbox.layout`).
  """

  before: str = ""
  listed: tuple[Listed, ...] = ()
  left_out: dict[str, str] = dataclasses.field(default_factory=dict)
  roster: Roster = Roster()
  is_split: bool = False
  begins_interval: bool = False
  num_slices: int = 0
  layout: str = ""

  @property
  def num_bytes(self) -> int:
    """Bytes that the manifest takes in a store, without signatures.

    The store has it twice: as a proposal, and as the decision.
    """
    return 2 * len(self._text())

  @property
  def names(self) -> list[str]:
    """Names of the replicas whose messages are averaged, in order."""
    return [message.replica for message in self.listed]

  def digest(self) -> str:
    """Returns the SHA-256 of the whole manifest, as 64 hexadecimal digits."""
    return hashlib.sha256(self._text().encode()).hexdigest()

  def _text(self) -> str:
    """Returns the manifest as JSON."""
    return json.dumps(dataclasses.asdict(self), sort_keys=True)

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> "Manifest":
    """Builds a manifest from the fields that `dataclasses.asdict` returns."""
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
  """Returns the manifest of a turn: which of the sent messages are averaged.

  A message is left out if its sender's shared state is refused (`states`), if
  its values are not finite, or if its norm is too large. A message with a large
  norm gets a lower weight (the module's docstring has the formula). The caller
  sets the fields `begins_interval`, `num_slices` and `layout`.

  Args:
    sent: The messages of the turn, one of each replica, by the replica's name,
      in the order in which replicas joined.
    before: The field `Manifest.before`.
    accepted: Median norms of earlier turns (`Memory.norms`), the oldest first.
    max_norm_ratio: A message is left out if its norm is more than this many
      times the usual norm (`usual_norm`).
    roster: The replicas that take part after this event.
    states: The messages that do not count because of their senders' states.
    full_weight_ratio: A message loses weight if its norm is more than this many
      times the usual norm.
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
  """Returns the Euclidean norm of the floating-point values of a message.

  Arrays of integers are not counted. So the norm of a message with an integer
  codec is the norm of its scales. The result is NaN if a value is NaN.
  """
  squares = 0.0
  for array in arrays:
    if array.dtype.kind == "V":  # The short floats of `ml_dtypes`.
      array = array.astype(np.float32)
    if array.dtype.kind == "f":
      flat = array.reshape(-1)
      # This adds in float64 without a copy of the array in float64.
      squares += float(np.einsum("i,i->", flat, flat, dtype=np.float64))
  return math.sqrt(squares) if squares >= 0 else math.nan


def usual_norm(
  norms: Iterable[float], accepted: Sequence[float]
) -> float | None:
  """Returns the usual norm, with which the norms of a turn are compared.

  Norms that are 0 (of replicas without progress) or not finite do not count.
  The usual norm depends on how many norms count:

  - three or more: their median (of an even number, the lower of the two middle
    norms);
  - two: the lower one, or the running median if there is one and it is higher;
  - one: the running median; None if `accepted` has fewer than six values;
  - none: None.

  The running median is the median of the last six values of `accepted`, or of
  all its values if there are fewer. Of an even number of values, it is the
  higher of the two middle ones.

  Args:
    norms: Norms of the messages of a turn: one message of each replica.
    accepted: Median norms of earlier turns (`Memory.norms`), the oldest first.
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
  """Returns which messages are left out because of their norms, and why.

  Args:
    norms: Norms of the messages of a turn (one message of each replica), by
      replica.
    accepted: Median norms of earlier turns (`Memory.norms`), the oldest first.
    max_ratio: A message is left out if its norm is more than this many times
      the usual norm (`usual_norm`), or not finite.

  Returns:
    The reason, for each replica whose message is left out.
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
  """Returns the factors by which the weights of large messages are reduced.

  The factor is min(1, full_ratio * usual / norm), squared if at least three
  norms are not 0. It is 1 for a norm of 0, and if there is no usual norm.

  Args:
    norms: Norms of the messages that are averaged, by replica.
    accepted: Median norms of earlier turns (`Memory.norms`), the oldest first.
    full_ratio: Largest ratio to the usual norm (`usual_norm`) with factor 1.
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
