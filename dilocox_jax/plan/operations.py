"""The operations over replicas that an exchange consists of.

An operation knows two things, and both stand in its class: the bytes that one
replica sends, and the messages that it consists of. Bytes are counted by the
trainer and the report; the simulator lets the messages travel over links.

The bytes that one of M = 3 replicas sends when each has 1200 bytes of codes:

    all-gather       2 x 1200 = 2400
    reduce-scatter   800 (two slices of 400 to their owners) + 2 x 400 = 1600

With M = 9 they are 9600 and about 2140. For M = 2 both are 1200.
"""

import dataclasses
from typing import ClassVar

from dilocox_jax.checks import one_of


@dataclasses.dataclass(frozen=True)
class Send:
  """Messages that leave together: every replica i sends one to i + hop.

  Attributes:
    hop: Distance of the receiver: replica i sends to i + hop (modulo M).
    size_bytes: Size of each message (bytes).
    sender: Index of the only replica that sends; None if all replicas send.
  """

  hop: int
  size_bytes: float
  sender: int | None = None


@dataclasses.dataclass(frozen=True)
class Operation:
  """One operation over the replica axis.

  Attributes:
    operand_bytes: Size of one replica's operand (bytes).
    turn: Number of messages of the same exchange, one after the other, whose
      results the operation needs before it can begin. In low rank the left
      factor has turn 0 and the right factor turn 1.
    kind: Name of the operation, e.g. "all_reduce".
  """

  operand_bytes: int
  turn: int = 0
  kind: ClassVar[str] = ""

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns the bytes that a replica sends; it receives as many.

    Args:
      num_replicas: Number of replicas, M; a single replica sends nothing.
    """
    raise NotImplementedError

  def sends(self, num_replicas: int) -> list[Send]:
    """Returns the messages of the operation, in order.

    Args:
      num_replicas: Number of replicas, M; a single replica sends nothing.
    """
    raise NotImplementedError


class AllReduce(Operation):
  """Adds up the operands on a ring; every replica gets the sum.

  In M - 1 messages a replica passes on the partial sum of a slice that it has
  just received, so that in the end each has one slice of the sum. In M - 1
  more messages these slices go round. With M = 3 and an operand of 1200 bytes
  a replica sends four slices of 400 bytes.

  Source: Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce".
  """

  kind = "all_reduce"

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns 2 (M - 1) / M of the operand, rounded up (bytes)."""
    return _share(2 * (num_replicas - 1), self.operand_bytes, num_replicas)

  def sends(self, num_replicas: int) -> list[Send]:
    """Returns 2 (M - 1) messages of a slice each."""
    slice_bytes = self.operand_bytes / num_replicas
    return [Send(hop=1, size_bytes=slice_bytes)] * (2 * (num_replicas - 1))


class AllGather(Operation):
  """Passes every operand round a ring; every replica gets all.

  Source: Thakur et al., 2005, section 4.1.
  """

  kind = "all_gather"

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns M - 1 times the operand (bytes)."""
    return (num_replicas - 1) * self.operand_bytes

  def sends(self, num_replicas: int) -> list[Send]:
    """Returns M - 1 messages of a whole operand each."""
    size_bytes = float(self.operand_bytes)
    return [Send(hop=1, size_bytes=size_bytes)] * (num_replicas - 1)


class AllToAll(Operation):
  """Sends to each replica its slice of the operand.

  The messages do not depend on each other. Every replica keeps its own slice.
  """

  kind = "all_to_all"

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns (M - 1) / M of the operand, rounded up (bytes)."""
    return _share(num_replicas - 1, self.operand_bytes, num_replicas)

  def sends(self, num_replicas: int) -> list[Send]:
    """Returns M - 1 messages of a slice each, to one after the other."""
    slice_bytes = self.operand_bytes / num_replicas
    hops = range(1, num_replicas)
    return [Send(hop=hop, size_bytes=slice_bytes) for hop in hops]


class Broadcast(Operation):
  """Passes one operand on, from replica 0 to 1, from 1 to 2 and so on."""

  kind = "broadcast"

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns the operand, which no replica sends twice (bytes)."""
    return self.operand_bytes if num_replicas > 1 else 0

  def sends(self, num_replicas: int) -> list[Send]:
    """Returns M - 1 messages, each of another sender."""
    size_bytes = float(self.operand_bytes)
    senders = range(num_replicas - 1)
    return [Send(1, size_bytes, sender=sender) for sender in senders]


class Permute(Operation):
  """Sends the operand of every replica to one other replica.

  Which one is left to the program. The simulator lets it be the replica that
  is M / 2 places further, which is the longest way on a ring of links.
  """

  kind = "permute"

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns the operand (bytes)."""
    return self.operand_bytes if num_replicas > 1 else 0

  def sends(self, num_replicas: int) -> list[Send]:
    """Returns a single message."""
    if num_replicas == 1:
      return []
    return [Send(num_replicas // 2, float(self.operand_bytes))]


class StoreObject(Operation):
  """Writes the operand into a store once, and reads those of the others."""

  kind = "mailbox"

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns the operand, which is written once (bytes)."""
    return self.operand_bytes if num_replicas > 1 else 0


OPERATIONS: dict[str, type[Operation]] = {
  operation.kind: operation
  for operation in (
    AllReduce,
    AllGather,
    AllToAll,
    Broadcast,
    Permute,
    StoreObject,
  )
}


def operation(kind: str, operand_bytes: int, turn: int = 0) -> Operation:
  """Returns the operation of a kind.

  Args:
    kind: One of `OPERATIONS`, e.g. "all_reduce".
    operand_bytes: Size of one replica's operand (bytes).
    turn: As in `Operation`.

  Raises:
    ValueError: If there is no such kind.
  """
  one_of("kind", kind, OPERATIONS)
  return OPERATIONS[kind](operand_bytes, turn)


def _share(numerator: int, operand_bytes: int, num_replicas: int) -> int:
  """Returns numerator / M of an operand, rounded up (bytes)."""
  return -(-numerator * operand_bytes // num_replicas)
