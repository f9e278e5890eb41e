"""What one exchange puts on the wire.

Bytes are derived here, once, from shapes, payload and collective; trainer,
report and simulator quote this and count nothing themselves.
"""

import dataclasses
from collections.abc import Iterable

from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.plan.schedule.sync_schedule import Window
from dilocox_jax.plan.wire.collectives import Collective, collectives
from dilocox_jax.plan.wire.leaf import Shapes
from dilocox_jax.plan.wire.payload import Dense, Payload


def broadcast_bytes(payload_bytes: int, num_replicas: int) -> int:
  """Bytes the busiest replica sends when one replica's state is copied.

  The copies are passed along a chain, so nobody sends the payload twice.

  Args:
    payload_bytes: Size of what is copied (bytes).
    num_replicas: M; one replica alone sends nothing.
  """
  return Collective("broadcast", payload_bytes).sent_bytes(num_replicas)


@dataclasses.dataclass(frozen=True)
class Traffic:
  """Bytes that one replica sends, event by event; it receives as many.

  Attributes:
    method: The method's schedule.
    fragments: The division of the tree.
    shapes: Leaf shapes of the whole tree by path.
    num_replicas: M.
    payload: What the method sends; warm starts send a plain sum in fp32.
    collective: How the method sends it (`plan.collectives`).
  """

  method: Method
  fragments: Fragments
  shapes: Shapes
  num_replicas: int
  payload: Payload = Dense()
  collective: str = "auto"

  def exchange(self, fragment: int) -> list[Collective]:
    """The operations of one exchange of a fragment."""
    return self._operations(
      self.payload, self.fragments.shapes(fragment, self.shapes)
    )

  def exchange_bytes(self, fragment: int) -> int:
    """One exchange of a fragment."""
    return self._sent_bytes(self.exchange(fragment))

  def gradient(self) -> list[Collective]:
    """The operations of one data-parallel step: the whole tree's gradients."""
    if self.method.exchanged == "gradient":
      return self._operations(self.payload, self.shapes)
    return collectives(Dense(), self.shapes, self.num_replicas)  # A warm start.

  def gradient_bytes(self) -> int:
    """One data-parallel step."""
    return self._sent_bytes(self.gradient())

  def segment_bytes(self, segment: Segment) -> int:
    """All exchanges that a segment completes."""
    if segment.phase == "single":
      return 0
    if segment.phase == "data_parallel":
      return segment.num_steps * self.gradient_bytes()
    return self._windows_bytes(segment.windows)

  def flush_bytes(self, step: int) -> int:
    """Bytes of the flush after a number of inner steps of the schedule."""
    return self._windows_bytes(self.method.schedule.flush_windows(step))

  def _windows_bytes(self, windows: Iterable[Window]) -> int:
    return sum(
      self.exchange_bytes(window.applied.fragment)
      for window in windows
      if window.applied
    )

  def _operations(self, payload: Payload, shapes: Shapes) -> list[Collective]:
    return collectives(payload, shapes, self.num_replicas, self.collective)

  def _sent_bytes(self, operations: list[Collective]) -> int:
    return sum(each.sent_bytes(self.num_replicas) for each in operations)
