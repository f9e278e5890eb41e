"""Bytes that exchanges put on the wire.

Bytes are derived here, once, from shapes, codec and collective. Trainer,
report and simulator use these numbers and count nothing themselves.
"""

import dataclasses
from collections.abc import Iterable

from dilocox_jax.aggregators.collectives import collectives
from dilocox_jax.aggregators.kinds import EXCHANGES
from dilocox_jax.codecs.base import Codec
from dilocox_jax.codecs.quantize import Float
from dilocox_jax.plan.choices import loaded
from dilocox_jax.plan.collective import Collective
from dilocox_jax.plan.schedule.fragments import Fragments, Shapes
from dilocox_jax.plan.schedule.membership import RoundAttendance
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.plan.schedule.sync_schedule import Window


@dataclasses.dataclass(frozen=True)
class Traffic:
  """Bytes that one replica sends, event by event; it receives as many.

  Attributes:
    method: Schedule and kind of what is exchanged.
    fragments: Division of the tree into fragments.
    shapes: Leaf shapes of the whole tree by path.
    num_replicas: M.
    codec: Codec of the method; warm starts send a plain sum in fp32.
    collective: Operation that carries the messages, one of
      `plan.collective.COLLECTIVES`.
    exchange_kind: Name of the kind of exchange, one of
      `aggregators.kinds.EXCHANGES`.
  """

  method: Method
  fragments: Fragments
  shapes: Shapes
  num_replicas: int
  codec: Codec = Float()
  collective: str = "auto"
  exchange_kind: str = "mean"

  def exchange(self, fragment: int) -> list[Collective]:
    """Returns the collectives of one exchange of a fragment, in order."""
    return self._operations(self.fragments.shapes(fragment, self.shapes))

  def exchange_bytes(self, fragment: int) -> int:
    """Returns the bytes of one exchange of a fragment."""
    return self._sent_bytes(self.exchange(fragment))

  def gradient(self) -> list[Collective]:
    """Returns the collectives of one data-parallel step, in order.

    They carry the gradients of the whole tree.
    """
    if self.method.exchanged == "gradient":
      return self._operations(self.shapes)
    # Only the warm start of a method with rounds exchanges gradients.
    return collectives(Float(), self.shapes, self.num_replicas)

  def gradient_bytes(self) -> int:
    """Returns the bytes of one data-parallel step."""
    return self._sent_bytes(self.gradient())

  def segment_bytes(self, segment: Segment) -> int:
    """Returns the bytes of all exchanges that a segment applies."""
    if segment.phase == "data_parallel":
      return segment.num_steps * self.gradient_bytes()
    return self.among(segment.attendance)._windows_bytes(segment.windows)

  def among(self, attendance: RoundAttendance | None) -> "Traffic":
    """Returns the traffic of exchanges between those who are present.

    Args:
      attendance: Who is present; None: all replicas.
    """
    if attendance is None:
      return self
    return dataclasses.replace(self, num_replicas=len(attendance.members))

  def flush_bytes(
    self, step: int, attendance: RoundAttendance | None = None
  ) -> int:
    """Returns the bytes of the flush at the end of a run.

    Args:
      step: Inner steps of the schedule finished.
      attendance: Who is present; None: all replicas.
    """
    windows = self.method.schedule.flush_windows(step)
    return self.among(attendance)._windows_bytes(windows)

  def _windows_bytes(self, windows: Iterable[Window]) -> int:
    return sum(
      self.exchange_bytes(window.applied.fragment)
      for window in windows
      if window.applied
    )

  def _operations(self, shapes: Shapes) -> list[Collective]:
    planned = loaded(EXCHANGES[self.exchange_kind].collectives)
    return planned(self.codec, shapes, self.num_replicas, self.collective)

  def _sent_bytes(self, operations: list[Collective]) -> int:
    return sum(op.sent_bytes(self.num_replicas) for op in operations)
