"""One operation over the replicas, its bytes, and the steps that hide it.

The bytes that one of M = 3 replicas sends when each has 1200 bytes of codes:

    all_gather       2 x 1200 = 2400
    reduce_scatter   800 (two slices of 400 to their owners) + 2 x 400 = 1600

With M = 9 they are 9600 and about 2140. For M = 2 both are 1200.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

COLLECTIVES = ("auto", "all_reduce", "all_gather", "reduce_scatter")
# Replicas that are programs of their own exchange through a store instead: each
# writes its message once, and reads those of the others.
MAILBOX = "mailbox"


@dataclasses.dataclass(frozen=True)
class Collective:
  """One operation over the replica axis.

  Attributes:
    kind: "all_reduce", "all_gather", "all_to_all", "broadcast", "permute" or
      "mailbox".
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
    one other replica. Through a mailbox it writes the operand once, and reads
    M - 1 others.

    Source: Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce".

    Args:
      num_replicas: Number of replicas, M; a single replica sends nothing.
    """
    others = num_replicas - 1
    if self.kind in ("broadcast", "permute", MAILBOX):
      return self.operand_bytes if others else 0
    if self.kind == "all_gather":
      return others * self.operand_bytes
    twice = 2 if self.kind == "all_reduce" else 1
    return -(-twice * others * self.operand_bytes // num_replicas)


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
    stop = (num_steps * end + PARTS // 2) // PARTS  # The nearest step.
    yield stop - start
    start = stop
