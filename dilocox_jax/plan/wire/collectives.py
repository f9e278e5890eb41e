"""The collective that carries an encoding, and the bytes that it sends.

The network may add up fp32 values. Codes cannot be added. Either all replicas
gather all codes, or each replica decodes and adds up one slice and encodes the
mean of the slice once more. The second rounds twice, but its bytes hardly grow
with the number of replicas. Selected values have different places on different
replicas and are always gathered.

The bytes that one of M = 3 replicas sends when each has 1200 bytes of codes:

    all_gather       2 x 1200 = 2400
    reduce_scatter   800 (two slices of 400 to their owners) + 2 x 400 = 1600

With M = 9 they are 9600 and about 2140. For M = 2 both are 1200.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dilocox_jax.checks import one_of, require
from dilocox_jax.plan.choices import Lazy, Registry, check_lazy
from dilocox_jax.plan.wire.chain import Encoding, leaf_messages, links_of
from dilocox_jax.plan.wire.leaf import Leaf, Shapes, leaf_of
from dilocox_jax.plan.wire.payload import Dense, Payload

# Replicas that a sum of 16-bit values can count: bfloat16 has no 257.
MOST_IN_16_BITS = 256
COLLECTIVES = ("auto", "all_reduce", "all_gather", "reduce_scatter")


@dataclasses.dataclass(frozen=True)
class Collective:
  """One operation over the replica axis.

  Attributes:
    kind: "all_reduce", "all_gather", "all_to_all", "broadcast" or "permute".
    operand_bytes: Size of one replica's operand (bytes).
    turn: Number of messages of the same exchange, one after the other, whose
      results it needs before it can be sent. In low rank the left factor has
      turn 0 and the right factor turn 1.
  """

  kind: str
  operand_bytes: int
  turn: int = 0

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns the bytes that a replica sends, and receives, on a ring.

    An all-reduce sends 2 (M - 1) / M of the operand, rounded up; an all-gather
    M - 1 times the operand; an all-to-all (M - 1) / M of it, as every replica
    keeps its own slice. With M = 3 and an operand of 1200 bytes these are 1600,
    2400 and 800 bytes. A broadcast is passed on from one replica to the next,
    so that none sends it twice. In a permute every replica sends the operand to
    one other replica.

    Source: Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce".

    Args:
      num_replicas: Number of replicas, M; a single replica sends nothing.
    """
    others = num_replicas - 1
    if self.kind in ("broadcast", "permute"):
      return self.operand_bytes if others else 0
    if self.kind == "all_gather":
      return others * self.operand_bytes
    twice = 2 if self.kind == "all_reduce" else 1
    return -(-twice * others * self.operand_bytes // num_replicas)


def chosen_collective(
  encoding: Encoding, collective: str, num_replicas: int
) -> str:
  """Returns the collective for an encoding.

  "auto" stands for the one that sends least. For two replicas gathering and
  scattering send equally much, and gathering is taken, since it rounds once.

  Args:
    encoding: Encoding of the values to send.
    collective: One of `COLLECTIVES`.
    num_replicas: Number of replicas, M.

  Raises:
    ValueError: If the collective cannot carry the encoding.
  """
  if collective == "auto":
    if encoding.is_summable:
      return "all_reduce"
    scatters = encoding.keeps_places and num_replicas > 2
    return "reduce_scatter" if scatters else "all_gather"
  if collective == "all_reduce":
    require(
      isinstance(encoding.links[0], Dense),
      f"collective={collective!r} would add up codes: take 'all_gather' or "
      "'reduce_scatter', or a dense codec",
    )
    require(
      encoding.is_summable or num_replicas <= MOST_IN_16_BITS,
      f"collective={collective!r} counts at most {MOST_IN_16_BITS} replicas in "
      "16 bits: take 'all_gather' or 'reduce_scatter', or float32",
    )
  require(
    encoding.keeps_places or collective != "reduce_scatter",
    f"collective={collective!r} needs every value in its place, but the codec "
    "selects values: take 'all_gather'",
  )
  one_of("collective", collective, COLLECTIVES)
  return collective


def check_collective(payload: Payload, collective: str) -> None:
  """Raises ValueError if a collective cannot carry a payload."""
  links = [link for link in links_of(payload) if not link.is_projection]
  chosen_collective(Encoding(tuple(links)), collective, 2)


def collectives(
  payload: Payload,
  shapes: Shapes,
  num_replicas: int,
  collective: str = "auto",
) -> list[Collective]:
  """Lists the operations of one exchange of some leaves in turn.

  The first messages of all leaves that use the same collective are sent as one
  message; so are their second messages. Each says whether its sender
  participates. A leaf of zero size is not sent.

  Args:
    payload: Payload of the exchange.
    shapes: Leaf shapes by path.
    num_replicas: Number of replicas, M.
    collective: One of `COLLECTIVES`.

  Raises:
    ValueError: If the collective cannot carry the payload.
  """
  messages: dict[tuple[int, str], collections.Counter[str]] = {}
  for path, shape in shapes.items():
    if not math.prod(shape):
      continue
    of_leaf = leaf_messages(payload, leaf_of(path, shape))
    for step, (encoding, leaf) in enumerate(of_leaf):
      way = chosen_collective(encoding, collective, num_replicas)
      flags = _flags(encoding, way, num_replicas)
      operands = messages.setdefault((step, way), flags)
      if way == "reduce_scatter":
        slices = encoding.links[0].slices(leaf, num_replicas)
        operands["all_to_all"] += encoding.num_bytes(slices)
        operands["all_gather"] += encoding.num_bytes(Leaf(1, slices.shape))
      else:
        operands[way] += encoding.num_bytes(leaf)
  found, turn = [], 0
  steps = sorted(messages.items(), key=lambda item: item[0][0])
  for _, ways in itertools.groupby(steps, lambda item: item[0][0]):
    # The means of a reduce-scatter need what the all-to-all has brought.
    late = 0
    for (_, way), operands in ways:
      is_scatter = way == "reduce_scatter"
      late = max(late, int(is_scatter))
      for kind, size in operands.items():
        after = int(is_scatter and kind == "all_gather")
        found.append(Collective(kind, size, turn + after))
    turn += 1 + late
  return found


# Parts into which the inner steps behind an exchange are divided, at most.
PARTS = 1024


def stretch_ends(
  operations: Sequence[Collective], num_replicas: int
) -> tuple[int, ...]:
  """Divides the inner steps behind an exchange among its turns, by bytes.

  What needs the result of a message cannot travel with it. So the steps that
  hide an exchange are run in as many stretches as it has turns.

  Args:
    operations: Collectives of one exchange, in order.
    num_replicas: Number of replicas, M.

  Returns:
    Where the stretch of each turn ends, in `PARTS` of all steps. Turns of
    3 MB and 1 MB give (768, 1024).
  """
  sent = [0] * (1 + max((each.turn for each in operations), default=0))
  for each in operations:
    sent[each.turn] += each.sent_bytes(num_replicas)
  ends = list(itertools.accumulate(sent))
  if not ends[-1]:
    ends = list(range(1, len(ends) + 1))
  return tuple(PARTS * end // ends[-1] for end in ends)


def stretches(num_steps: Any, ends: Sequence[int]) -> Iterator[Any]:
  """Yields the number of inner steps of every turn of an exchange.

  Args:
    num_steps: Number of inner steps behind the exchange. It may be traced.
    ends: Result of `stretch_ends`.
  """
  start = 0
  for end in ends:
    stop = num_steps * end // PARTS
    yield stop - start
    start = stop


@dataclasses.dataclass(frozen=True)
class ExchangeKind:
  """A way in which replicas combine what they measured.

  Attributes:
    collectives: Function with the arguments and results of `collectives`, which
      says what an exchange sends.
    aggregator: Function, or its place, from `exchange.compressed.Compression`
      and `exchange.feedback.Feedback` (None without feedback) to an
      `Aggregator`.
  """

  collectives: Callable[[Payload, Shapes, int, str], list[Collective]]
  aggregator: Lazy


EXCHANGES: Registry[ExchangeKind] = Registry("exchange")


def register_exchange(name: str, kind: ExchangeKind) -> None:
  """Makes a kind of exchange known under a name, for `exchange.kind`.

  Args:
    name: The name, e.g. "mean".
    kind: What is sent, and what sends it.

  Raises:
    ValueError: If the name is taken or a role of the exchange is missing.
  """
  check_lazy(f"exchange {name!r}: collectives", kind.collectives)
  check_lazy(f"exchange {name!r}: aggregator", kind.aggregator)
  EXCHANGES.add(name, kind)


register_exchange(
  "mean",
  ExchangeKind(collectives, "dilocox_jax.exchange.feedback:mean_over_replicas"),
)


def _flags(
  encoding: Encoding, way: str, num_replicas: int
) -> collections.Counter[str]:
  """Returns the bytes with which a message says if its sender participates.

  A sum has one more number, and what is gathered has one more byte from each
  sender. In a reduce-scatter, each owner of a slice gets a byte from each
  sender; the means that the owners then send need none.
  """
  if way == "reduce_scatter":
    return collections.Counter(all_to_all=num_replicas)
  if way == "all_gather":
    return collections.Counter(all_gather=1)
  return collections.Counter(all_reduce=encoding.num_bytes(Leaf(1, (1,))))
