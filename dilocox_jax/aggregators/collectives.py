"""The collective that carries a message, and what an exchange sends.

The network may add up fp32 values. Codes cannot be added. Either all replicas
gather all codes, or each replica decodes and adds up one slice and encodes the
mean of the slice once more. The second rounds twice, but its bytes hardly grow
with the number of replicas (`plan.collective`). Selected values have different
places on different replicas and are always gathered.

A replica sends M - 1 messages when it gathers. When it scatters it sends
(M - 1) / M of a message and as much of the means, which may have finer codes:
with 1 bit for values and 2 for means, 2 and 2 for M = 3, 3 and 2.25 for M = 4.

Bytes are those of the arrays that the codec's own `encode` returns, which JAX
derives from shapes without computing a value (`jax.eval_shape`). Trainer,
report and simulator use these numbers and count nothing themselves.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from dilocox_jax.checks import one_of, require
from dilocox_jax.codecs.base import Codec, Encoder, Quantiser, Reduced
from dilocox_jax.codecs.joining import Shape
from dilocox_jax.codecs.quantize import Float
from dilocox_jax.meeting.messages import HEADER_BYTES
from dilocox_jax.plan.collective import COLLECTIVES, MAILBOX, Collective
from dilocox_jax.plan.schedule.fragments import Fragments, Shapes, stacked_shape
from dilocox_jax.plan.schedule.membership import RoundAttendance
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.plan.schedule.sync_schedule import Window
from dilocox_jax.trees import Array, Pausing, without_pauses

# Bytes with which a sender says in a message whether it participates. A sum has
# one more number instead.
FLAG_BYTES = 1
NORM_BYTES = 4  # In which it first says how large its values are, if at all.


def chosen_collective(codec: Codec, collective: str, num_replicas: int) -> str:
  """Returns the collective that carries the messages of a codec.

  "auto" stands for the one that sends least of large leaves. Where these ways
  send equally much, as between two replicas, gathering is taken: it rounds once
  and waits for one message instead of two.

  Args:
    codec: The codec.
    collective: One of `plan.collective.COLLECTIVES`.
    num_replicas: Number of replicas, M.

  Raises:
    ValueError: If the collective cannot carry them.
  """
  one_of("collective", collective, COLLECTIVES)
  encoder = codec.encoder
  if collective == "auto":
    if encoder == Float():
      return "all_reduce"
    return _smallest(encoder, num_replicas)
  if collective == "all_reduce":
    require(
      encoder == Float(),
      f"collective={collective!r} would add up codes: take 'all_gather' or "
      "'reduce_scatter', or float32",
    )
  require(
    isinstance(encoder, Quantiser) or collective != "reduce_scatter",
    f"collective={collective!r} needs every value in its place, but the codec "
    "selects values: take 'all_gather'",
  )
  return collective


def _smallest(encoder: Encoder, num_replicas: int) -> str:
  """Whether gathering or scattering codes sends less."""
  if not isinstance(encoder, Quantiser):
    return "all_gather"
  values, means = (
    encoded_bytes(each, ((1, 4096),)) for each in (encoder, encoder.of_means)
  )
  scatters = values + means < num_replicas * values
  return "reduce_scatter" if scatters else "all_gather"


def collectives(
  codec: Codec,
  shapes: Shapes,
  num_replicas: int,
  collective: str = "auto",
  is_screened: bool = False,
) -> list[Collective]:
  """Lists the operations of one exchange of some leaves in turn.

  All leaves travel as one message. Each message says whether its sender
  participates. A leaf of zero size is not sent.

  Args:
    codec: Codec of the exchange.
    shapes: Leaf shapes by path.
    num_replicas: Number of replicas, M.
    collective: One of `plan.collective.COLLECTIVES`, or "mailbox".
    is_screened: Whether norms are compared first (`aggregators.screen`).

  Raises:
    ValueError: If the collective cannot carry the codec.
  """
  way = collective
  if way != MAILBOX:
    way = chosen_collective(codec, collective, num_replicas)
  # Bytes with which a sender says whether it participates, and of a header.
  more = {MAILBOX: HEADER_BYTES, "all_gather": FLAG_BYTES, "all_reduce": 4}
  norms = Collective("all_gather", NORM_BYTES, 0)
  encoder, found = codec.encoder, [norms] * is_screened
  for leaves in message_shapes(codec, stacked_shapes(shapes)):
    turn = len({each.turn for each in found})
    if way != "reduce_scatter":
      size = encoded_bytes(encoder, leaves) + more[way]
      found.append(Collective(way, size, turn))
      continue
    values, means = _scattered_bytes(encoder, leaves, num_replicas)
    size = values + num_replicas * FLAG_BYTES
    found.append(Collective("all_to_all", size, turn))
    # The means need what the all-to-all has brought, and no flag.
    found.append(Collective("all_gather", means // num_replicas, turn + 1))
  return found


def message_bytes(codec: Codec, shapes: Shapes) -> int:
  """Returns the size of one replica's encoded tree (bytes).

  Args:
    codec: Codec of the exchange.
    shapes: Leaf shapes by path.
  """
  of_messages = message_shapes(codec, stacked_shapes(shapes))
  return sum(encoded_bytes(codec.encoder, leaves) for leaves in of_messages)


def stacked_shapes(shapes: Shapes) -> tuple[Shape, ...]:
  """Returns the shapes that codecs see, of the leaves that have values."""
  sent = {path: shape for path, shape in shapes.items() if math.prod(shape)}
  return tuple(stacked_shape(path, shape) for path, shape in sent.items())


@functools.cache
def message_shapes(
  codec: Codec, shapes: tuple[Shape, ...]
) -> tuple[tuple[Shape, ...], ...]:
  """Returns the shapes of the leaves in each message of a codec.

  low_rank has two messages, the left factors and the right ones. All other
  codecs have one.

  Args:
    codec: The codec.
    shapes: Shapes of the leaves, with the layer axis.
  """

  def run(leaves: list[Array], key: Array) -> list[list[Array]]:
    sent = []

    def reduce(own: list[Array]) -> Pausing:
      sent.append(own)
      yield own
      return Reduced(own, own)

    state = codec.init(shapes, key)
    without_pauses(codec.run)(leaves, state, key, reduce)
    return sent

  key = jax.eval_shape(jax.random.key, 0)
  sent = jax.eval_shape(run, _values(shapes), key)
  return tuple(tuple(leaf.shape for leaf in leaves) for leaves in sent)


@functools.cache
def encoded_bytes(encoder: Encoder, shapes: tuple[Shape, ...]) -> int:
  """Returns the size of the arrays in which some leaves are sent (bytes).

  Args:
    encoder: The encoder.
    shapes: Shapes of the leaves, with the layer axis.
  """
  arrays = jax.eval_shape(encoder.encode, _values(shapes))
  return _num_bytes(arrays)


@functools.cache
def _scattered_bytes(
  encoder: Encoder, shapes: tuple[Shape, ...], num_slices: int
) -> list[int]:
  """Returns the bytes of all slices of some leaves, and of all their means."""
  assert isinstance(encoder, Quantiser)
  layout = encoder.layout(shapes, num_slices)
  rows = jax.eval_shape(layout.rows, _values(shapes))
  return [
    _num_bytes(jax.eval_shape(own.coded, rows))
    for own in (encoder, encoder.of_means)
  ]


def _num_bytes(arrays: Sequence[jax.ShapeDtypeStruct]) -> int:
  return sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)


def _values(shapes: Sequence[Shape]) -> list[jax.ShapeDtypeStruct]:
  return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


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
    is_screened: Whether norms are compared first (`aggregators.screen`).
  """

  method: Method
  fragments: Fragments
  shapes: Shapes
  num_replicas: int
  codec: Codec = Float()
  collective: str = "auto"
  is_screened: bool = False

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
    applied = [window.applied for window in windows if window.applied]
    return sum(self.exchange_bytes(event.fragment) for event in applied)

  def _operations(self, shapes: Shapes) -> list[Collective]:
    given = self.num_replicas, self.collective, self.is_screened
    return collectives(self.codec, shapes, *given)

  def _sent_bytes(self, operations: list[Collective]) -> int:
    return sum(op.sent_bytes(self.num_replicas) for op in operations)
