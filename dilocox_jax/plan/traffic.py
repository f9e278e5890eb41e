"""What one exchange puts on the wire.

Bytes are derived here, once, from shapes and the chosen collective; trainer,
report and simulator quote this and count nothing themselves.
"""

import dataclasses
import math
from collections.abc import Mapping

from dilocox_jax.plan.fragments import Fragments
from dilocox_jax.plan.methods import Method
from dilocox_jax.plan.segments import Segment

DENSE_VALUE_BYTES = 4  # Uncompressed pseudo-gradients travel as fp32.


def dense_bytes(num_values: int) -> int:
  """Payload of an uncompressed fragment (bytes)."""
  return num_values * DENSE_VALUE_BYTES


def ring_all_reduce_bytes(payload_bytes: int, num_replicas: int) -> int:
  """Bytes a replica sends, and receives, for one ring all-reduce.

  Each of M replicas passes on M - 1 chunks of 1/M twice, once reduced and
  once gathered: 2 (M - 1) / M of the payload, rounded up to whole bytes.

  Args:
    payload_bytes: Size of the reduced buffer (bytes).
    num_replicas: M; one replica alone sends nothing.

  Source: Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce".
  """
  return -(-2 * (num_replicas - 1) * payload_bytes // num_replicas)


def broadcast_bytes(payload_bytes: int, num_replicas: int) -> int:
  """Bytes the busiest replica sends when one replica's state is copied.

  The copies are passed along a chain, so nobody sends the payload twice.

  Args:
    payload_bytes: Size of what is copied (bytes).
    num_replicas: M; one replica alone sends nothing.
  """
  return payload_bytes if num_replicas > 1 else 0


@dataclasses.dataclass(frozen=True)
class Traffic:
  """Bytes that one replica sends, event by event; it receives as many.

  Attributes:
    method: The method's schedule.
    fragments: The division of the tree.
    shapes: Leaf shapes of the whole tree by path.
    num_replicas: M.
  """

  method: Method
  fragments: Fragments
  shapes: Mapping[str, tuple[int, ...]]
  num_replicas: int

  def exchange_bytes(self, fragment: int) -> int:
    """One exchange of a fragment."""
    payload = dense_bytes(self.fragments.num_values(fragment, self.shapes))
    return ring_all_reduce_bytes(payload, self.num_replicas)

  def gradient_bytes(self) -> int:
    """One data-parallel step: the whole tree's gradients."""
    values = sum(math.prod(shape) for shape in self.shapes.values())
    return ring_all_reduce_bytes(dense_bytes(values), self.num_replicas)

  def segment_bytes(self, segment: Segment) -> int:
    """All exchanges that a segment completes."""
    if segment.phase == "single":
      return 0
    if segment.phase == "data_parallel":
      return segment.num_steps * self.gradient_bytes()
    return sum(
      self.exchange_bytes(window.applied.fragment)
      for window in segment.windows
      if window.applied
    )

  def flush_bytes(self, step: int) -> int:
    """The flush after a number of inner steps of the schedule."""
    schedule = self.method.schedule
    return sum(
      schedule.flush_exchanges(step, fragment) * self.exchange_bytes(fragment)
      for fragment in range(schedule.num_fragments)
    )
