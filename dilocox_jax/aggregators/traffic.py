"""Computes the operations (such as all-gathers) and the bytes of exchanges."""

import dataclasses
import functools
from collections.abc import Callable, Iterable

from dilocox_jax.aggregators.collective import (
  Collective,
  chosen_collective,
)
from dilocox_jax.aggregators.sizes import message_shapes, stacked_shapes
from dilocox_jax.codecs.base import Codec
from dilocox_jax.codecs.quantize import Float
from dilocox_jax.plan.collectives import AUTO
from dilocox_jax.plan.operations import AllGather, Operation
from dilocox_jax.plan.schedule.fragments import Fragments, Shapes
from dilocox_jax.plan.schedule.membership import RoundParticipation
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment
from dilocox_jax.plan.schedule.sync_schedule import Window

# With `norm_filter`, each replica first sends the norm of its values in fp32.
NORM_BYTES = 4


def exchange_operations(
  codec: Codec,
  shapes: Shapes,
  num_replicas: int,
  collective: str | Collective = AUTO,
  compares_norms: bool = False,
) -> list[Operation]:
  """Returns the operations of one exchange in order, e.g. two all-gathers.

  Args:
    codec: Codec of the exchange.
    shapes: Shapes of the leaves by path. Empty leaves are not sent.
    num_replicas: Number of replicas, M.
    collective: A name in `plan.collectives.collective_names()`, or a
      collective.
    compares_norms: Whether replicas first compare the norms of their values
      (`norm_filter`).

  Raises:
    ValueError: If there is no collective of this name, or the collective cannot
      average messages of the codec.
  """
  chosen = chosen_collective(codec, collective, num_replicas)
  operations: list[Operation] = []
  if compares_norms:
    operations.append(AllGather(NORM_BYTES))
  for leaves in message_shapes(codec, stacked_shapes(shapes)):
    # Each message needs the results of all earlier messages.
    first_turn = len({operation.turn for operation in operations})
    for operation in chosen.operations(codec.encoder, leaves, num_replicas):
      turn = first_turn + operation.turn
      operations.append(dataclasses.replace(operation, turn=turn))
  return operations


@dataclasses.dataclass(frozen=True)
class Traffic:
  """Computes how many bytes one replica sends in the exchanges of a run.

  Attributes:
    method: The method of the run, with its schedule.
    fragments: Division of the parameters into parts that are sent one by one.
    shapes: Shapes of all parameters by path.
    num_replicas: Number of replicas, M.
    codec: Codec of the exchanges. A data-parallel start sends gradients in fp32
      instead.
    collective: A name in `plan.collectives.collective_names()`, or a
      collective.
    compares_norms: Whether replicas first compare the norms of their values
      (`norm_filter`).
  """

  method: Method
  fragments: Fragments
  shapes: Shapes
  num_replicas: int
  codec: Codec = Float()
  collective: str | Collective = AUTO
  compares_norms: bool = False

  def exchange(self, fragment: int) -> list[Operation]:
    """Returns the operations that exchange a fragment, a part of the model."""
    return self._operations(self.fragments.shapes(fragment, self.shapes))

  def exchange_bytes(self, fragment: int) -> int:
    """Returns the bytes a replica sends to exchange a part of the model."""
    return self._bytes_among(fragment, self.num_replicas)

  @functools.cached_property
  def _bytes_among(self) -> Callable[[int, int], int]:
    """Function (fragment, number of replicas) -> bytes of an exchange."""

    def bytes_among(fragment: int, num_replicas: int) -> int:
      among = dataclasses.replace(self, num_replicas=num_replicas)
      return among._sent_bytes(among.exchange(fragment))

    # Counting takes long for large models.
    return functools.cache(bytes_among)

  def gradient(self) -> list[Operation]:
    """Returns the operations that average gradients in a data-parallel step."""
    if self.method.exchanged == "gradient":
      return self._operations(self.shapes)
    # A method with rounds exchanges gradients only in a data-parallel start.
    return exchange_operations(Float(), self.shapes, self.num_replicas)

  def gradient_bytes(self) -> int:
    """Returns the bytes that a replica sends in one data-parallel step."""
    return self._sent_bytes(self.gradient())

  def segment_bytes(self, segment: Segment) -> int:
    """Returns the bytes that a replica sends in a segment of the run.

    A segment is a round, or some data-parallel steps. A data-parallel step
    sends gradients. A round counts the exchanges whose means it applies.
    """
    if segment.phase == "data_parallel":
      return segment.num_steps * self.gradient_bytes()
    num_members = self._num_members(segment.participation)
    return self._windows_bytes(segment.windows, num_members)

  def flush_bytes(
    self, step: int, participation: RoundParticipation | None = None
  ) -> int:
    """Returns the bytes that a replica sends in the flush at the end of a run.

    The flush applies the means that are not applied yet, and exchanges what was
    trained since the last exchange. The bytes of all these exchanges count.

    Args:
      step: Number of inner steps that the run has made.
      participation: Says which replicas are present; None: all are.
    """
    windows = self.method.schedule.flush_windows(step)
    return self._windows_bytes(windows, self._num_members(participation))

  def run_bytes(self, plan: RunPlan) -> int:
    """Returns the bytes that a replica sends in a whole run, flush included.

    The bytes of a data-parallel start are included, too. In rounds with absent
    replicas, the bytes are those of exchanges among the present replicas.
    """
    sent_bytes = 0
    # Rounds that are alike are computed once and multiplied. With random
    # absences no two rounds are alike, so first all replicas are taken as
    # present. The bytes depend only on the number of present replicas, which
    # `num_present` finds fast.
    all_present = dataclasses.replace(plan, membership=None)
    for segment, count in all_present.repeated_segments():
      if plan.membership is None or segment.phase == "data_parallel":
        sent_bytes += count * self.segment_bytes(segment)
        continue
      # These `count` rounds are alike. `first` is the number of the first one.
      done = segment.start - segment.schedule_start
      first, _ = self.method.schedule.round_at(done)
      rounds = range(first, first + count)
      for num_members, number in plan.membership.num_present(rounds).items():
        round_bytes = self._windows_bytes(segment.windows, num_members)
        sent_bytes += number * round_bytes
    last_step = plan.schedule_step(plan.total_steps)
    return sent_bytes + self.flush_bytes(last_step, plan.flush_participation())

  def _num_members(self, participation: RoundParticipation | None) -> int:
    """Returns how many replicas are present; with None, all are."""
    return len(participation.members) if participation else self.num_replicas

  def _windows_bytes(self, windows: Iterable[Window], num_members: int) -> int:
    """Returns the bytes of the exchanges whose means some windows apply.

    Args:
      windows: Windows, each some inner steps, after which at most one mean is
        applied.
      num_members: Number of replicas that are present.
    """
    applied = [window.applied for window in windows if window.applied]
    return sum(
      self._bytes_among(event.fragment, num_members) for event in applied
    )

  def _operations(self, shapes: Shapes) -> list[Operation]:
    """Returns the operations of one exchange of leaves of these shapes."""
    return exchange_operations(
      self.codec,
      shapes,
      self.num_replicas,
      collective=self.collective,
      compares_norms=self.compares_norms,
    )

  def _sent_bytes(self, operations: list[Operation]) -> int:
    """Returns the bytes that one replica sends in some operations together."""
    return sum(each.sent_bytes(self.num_replicas) for each in operations)
