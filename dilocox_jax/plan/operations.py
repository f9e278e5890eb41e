"""Collective operations over replicas, with the bytes that they send.

To average a pseudo-gradient, replicas run one or more of these operations. For
example, M = 3 replicas average messages of 1200 bytes in one of two ways. In
these ways, each replica sends

    all-gather                     2 x 1200 = 2400 bytes
    all-to-all, then all-gather    2 x 400 + 2 x 400 = 1600 bytes

In the first way, whole messages go around a ring: a replica sends its own
message, and passes on another one. In the second way, messages are cut into
three slices, and each replica averages one slice of all messages. So a replica
first sends two slices of its message to the others. Then the three means go
around the ring, and a replica sends two of them.
"""

import dataclasses
from typing import ClassVar

from dilocox_jax.checks import one_of


@dataclasses.dataclass(frozen=True)
class Send:
  """One step of an operation: all replicas send a message, or only one does.

  All messages of a step have equal sizes, and are sent at the same time.

  Attributes:
    hop: Distance of the receiver: replica i sends to replica i + hop (modulo
      the number of replicas).
    size_bytes: Size of each message (bytes).
    sender: Index of the only replica that sends; None if all replicas send.
  """

  hop: int
  size_bytes: float
  sender: int | None = None


@dataclasses.dataclass(frozen=True)
class Operation:
  """Base class of the collective operations over replicas.

  Attributes:
    operand_bytes: Size of the array that one replica passes to the operation
      (bytes).
    turn: Number of earlier messages of the same exchange that the operation
      waits for. With a low-rank codec the left factor has turn 0 and the right
      factor turn 1.
    kind: Name of the operation, e.g. "all_reduce".
  """

  operand_bytes: int
  turn: int = 0
  kind: ClassVar[str] = ""

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns how many bytes one of `num_replicas` replicas sends.

    A single replica sends nothing.
    """
    raise NotImplementedError

  def sends(self, num_replicas: int) -> list[Send]:
    """Returns the steps in which `num_replicas` replicas send, in order.

    In a step every replica sends one message, or only one replica does. With a
    single replica the list is empty.
    """
    raise NotImplementedError


class AllReduce(Operation):
  """Adds up the replicas' operands on a ring. Every replica gets the sum.

  With M replicas, an operand is cut into M slices. In M - 1 messages, partial
  sums of slices go around the ring, until each replica has one slice of the
  sum. In M - 1 more messages these slices go around. For example, with M = 3
  and an operand of 1200 bytes a replica sends four slices of 400 bytes.

  Source: Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce".
  """

  kind = "all_reduce"

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns the bytes that a replica sends, 2 (M - 1) / M of the operand.

    They are rounded up to a whole number.
    """
    return _share(2 * (num_replicas - 1), self.operand_bytes, num_replicas)

  def sends(self, num_replicas: int) -> list[Send]:
    """Returns the 2 (M - 1) messages of a replica: slices of the operand."""
    slice_bytes = self.operand_bytes / num_replicas
    return [Send(hop=1, size_bytes=slice_bytes)] * (2 * (num_replicas - 1))


class AllGather(Operation):
  """Passes every operand along a ring. Every replica gets all operands.

  Source: Thakur et al., 2005, section 4.1.
  """

  kind = "all_gather"

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns the bytes that a replica sends: M - 1 times the operand."""
    return (num_replicas - 1) * self.operand_bytes

  def sends(self, num_replicas: int) -> list[Send]:
    """Returns the M - 1 messages of a replica, each of a whole operand."""
    size_bytes = float(self.operand_bytes)
    return [Send(hop=1, size_bytes=size_bytes)] * (num_replicas - 1)


class AllToAll(Operation):
  """Sends one slice of the operand to each replica.

  Each of the M replicas cuts its operand into M slices, and sends slice i to
  replica i. It keeps the slice of its own number. All slices can be sent at
  once.
  """

  kind = "all_to_all"

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns the bytes that a replica sends: (M - 1) / M of the operand.

    They are rounded up to a whole number.
    """
    return _share(num_replicas - 1, self.operand_bytes, num_replicas)

  def sends(self, num_replicas: int) -> list[Send]:
    """Returns the M - 1 messages of a replica: a slice to every other one."""
    slice_bytes = self.operand_bytes / num_replicas
    hops = range(1, num_replicas)
    return [Send(hop=hop, size_bytes=slice_bytes) for hop in hops]


class Broadcast(Operation):
  """Passes one operand from replica 0 to 1, from 1 to 2, and so on."""

  kind = "broadcast"

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns the bytes that a replica sends: the operand once.

    The last replica sends nothing, but is counted like the others. A single
    replica sends nothing.
    """
    return self.operand_bytes if num_replicas > 1 else 0

  def sends(self, num_replicas: int) -> list[Send]:
    """Returns the M - 1 messages: from replica 0 to 1, then from 1 to 2, ..."""
    size_bytes = float(self.operand_bytes)
    return [
      Send(hop=1, size_bytes=size_bytes, sender=sender)
      for sender in range(num_replicas - 1)
    ]


class Permute(Operation):
  """Sends the operand of every replica to one other replica.

  The compiled program decides which replica receives. `sends` assumes that
  replica i sends to i + floor(M / 2), the farthest one on a ring.
  """

  kind = "permute"

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns the bytes that a replica sends: the operand once.

    A single replica sends nothing.
    """
    return self.operand_bytes if num_replicas > 1 else 0

  def sends(self, num_replicas: int) -> list[Send]:
    """Returns one step, in which all replicas send; [] for a single replica."""
    if num_replicas == 1:
      return []
    size_bytes = float(self.operand_bytes)
    return [Send(hop=num_replicas // 2, size_bytes=size_bytes)]


class StoreObject(Operation):
  """Writes the operand into a store, and reads the other replicas' operands.

  A store is a folder or a bucket that all replicas can read. `sends` is not
  implemented, because no message goes to a replica.
  """

  kind = "mailbox"

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns the bytes that a replica writes: the operand once.

    A single replica writes nothing.
    """
    return self.operand_bytes if num_replicas > 1 else 0


@dataclasses.dataclass(frozen=True)
class StoreShares(Operation):
  """Averages operands through a store: each replica averages one part of them.

  A store is a folder or a bucket that all replicas can read. A replica writes
  its operand, and reads one slice of the operand of each other replica. It
  averages these slices and its own slice. The mean is its *share*. The replica
  writes the share and the share's rounding error (the residual), and reads the
  shares of the others. `sends` is not implemented, because no message goes to a
  replica.

  Attributes:
    residual_bytes: Size of the residuals of all shares together (bytes).
  """

  residual_bytes: int = 0
  kind = "mailbox_shares"

  def sent_bytes(self, num_replicas: int) -> int:
    """Returns the bytes that a replica writes: operand, share and residual.

    The share has 1 / M of `operand_bytes`, and its residual has 1 / M of
    `residual_bytes`. Their sum is rounded up. A single replica writes nothing.
    """
    if num_replicas == 1:
      return 0
    written = self.operand_bytes + self.residual_bytes
    return self.operand_bytes + _share(1, written, num_replicas)


OPERATIONS: dict[str, type[Operation]] = {
  operation.kind: operation
  for operation in (
    AllReduce,
    AllGather,
    AllToAll,
    Broadcast,
    Permute,
    StoreObject,
    StoreShares,
  )
}


def operation(kind: str, operand_bytes: int, turn: int = 0) -> Operation:
  """Builds an operation by the name of its kind, e.g. "all_reduce".

  Args:
    kind: Name of the kind, a key of `OPERATIONS`.
    operand_bytes: Size of the array that one replica passes to the operation
      (bytes).
    turn: Number of earlier messages of the same exchange that the operation
      waits for.

  Raises:
    ValueError: If there is no such kind.
  """
  one_of("kind", kind, OPERATIONS)
  return OPERATIONS[kind](operand_bytes, turn)


def _share(numerator: int, operand_bytes: int, num_replicas: int) -> int:
  """Returns the bytes of a share of an operand, rounded up.

  The share is `numerator` / `num_replicas`.
  """
  return -(-numerator * operand_bytes // num_replicas)
