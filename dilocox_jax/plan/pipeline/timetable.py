"""A pipeline schedule as a table that one compiled program executes.

All devices run the same program, so each stage cannot follow a list of its own.
The stages move in lockstep, one row of this table at a time. Every buffer has a
fixed size, and slot numbers are known before the program runs. This module
computes all of them as plain integers, so the train step schedules nothing. A
test can use numbers in place of activations. It checks that no slot is read
before its data arrived or overwritten before its data was read.

1F1B with p = 2 stages and m = 2 micro-batches takes six ticks:

    tick      0   1   2   3   4   5
    stage 0   F0  F1  .   B0  .   B1
    stage 1   .   F0  B0  F1  B1  .
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from dilocox_jax.plan.pipeline.orders import Tick
from dilocox_jax.plan.pipeline.timeline import Pipeline, TickTimes, timeline

ACTIONS = ("idle", "forward", "backward", "input_gradient", "weight_gradient")

_BACKWARDS = ("backward", "input_gradient")  # Other stages wait for these.

# Maps (stage, entry of the stage's list) to the row in which the stage does it.
_Rows = dict[tuple[int, Tick], int]


@dataclasses.dataclass(frozen=True, eq=False)
class Timetable:
  """The action of each stage in each tick, and the buffer slots of its data.

  Every array is int32 [num_ticks, num_stages]. The result of a tick is sent at
  the end of the tick and has arrived at the start of the next tick. A stage
  sends activations to the next stage. The last stage sends them to the first
  stage, which has the next chunk. Gradients go in the other direction. A slot
  number equal to the number of slots means "no slot". A slot is free again
  after the tick that reads it.

  Attributes:
    action: Index into `ACTIONS`.
    micro_batch: Micro-batch of the action; 0 when idle.
    chunk: Chunk of the action; 0 when idle.
    saved_slot: Slot where a forward puts the data that its backward needs, and
      where the backward or input gradient reads this data. There are no such
      slots, and none for gradients, without backwards.
    activation_put: Inbox slot for the activations that arrived at the start
      of the tick; no slot if none arrived.
    activation_slot: Inbox slot that a forward reads. The first chunk of the
      model reads tokens instead and has no slot.
    gradient_put: Inbox slot for the gradients that arrived at the start of
      the tick; no slot if none arrived.
    gradient_slot: Inbox slot that a backward or input gradient reads.
    turn_slot: Slot of the gradient buffer where a forward of the model's last
      chunk puts its output. The backward of that chunk starts from it.
    pair_slot: Slot where an input gradient puts the data that its weight
      gradient needs, and where the weight gradient reads this data.
    num_saved_slots: Number of slots for `saved_slot` on the stage that needs
      the most of them.
    num_activation_slots: The same number for activations that have arrived.
    num_gradient_slots: The same number for arrived gradients and for the
      outputs of the model's last chunk.
    num_pair_slots: The same number for `pair_slot`.
  """

  action: np.ndarray
  micro_batch: np.ndarray
  chunk: np.ndarray
  saved_slot: np.ndarray
  activation_put: np.ndarray
  activation_slot: np.ndarray
  gradient_put: np.ndarray
  gradient_slot: np.ndarray
  turn_slot: np.ndarray
  pair_slot: np.ndarray
  num_saved_slots: int
  num_activation_slots: int
  num_gradient_slots: int
  num_pair_slots: int

  @property
  def num_stages(self) -> int:
    """Number of stages of the pipeline (columns of the table)."""
    return self.action.shape[1]

  @property
  def num_chunks(self) -> int:
    """Number of chunks of layers that each stage holds."""
    return int(self.chunk.max()) + 1


def timetable(pipeline: Pipeline) -> Timetable:
  """Builds the timetable of a schedule.

  Every action is done in the earliest tick that its dependencies allow.

  Args:
    pipeline: The schedule.
  """
  row = _rows(pipeline)
  shape = (1 + max(row.values()), pipeline.num_stages)
  action, micro_batch, chunk = (np.zeros(shape, np.int32) for _ in range(3))
  for (stage, tick), at in row.items():
    action[at, stage] = ACTIONS.index(tick.direction)
    micro_batch[at, stage] = tick.micro_batch
    chunk[at, stage] = tick.chunk
  saved = _Buffer(shape, _lives(row, "forward", _BACKWARDS))
  activations = _Buffer(shape, _arriving(pipeline, row, ("forward",)))
  arriving = _arriving(pipeline, row, _BACKWARDS)
  turning = _turning(pipeline, row)
  gradients = _Buffer(shape, [*arriving, *turning])
  pairs = _Buffer(shape, _lives(row, "input_gradient", ("weight_gradient",)))
  return Timetable(
    action,
    micro_batch,
    chunk,
    saved_slot=saved.slots(saved.lives, saved.lives),
    activation_put=activations.slots(put=activations.lives),
    activation_slot=activations.slots(read=activations.lives),
    gradient_put=gradients.slots(put=arriving),
    gradient_slot=gradients.slots(read=gradients.lives),
    turn_slot=gradients.slots(put=turning),
    pair_slot=pairs.slots(pairs.lives, pairs.lives),
    num_saved_slots=saved.num_slots,
    num_activation_slots=activations.num_slots,
    num_gradient_slots=gradients.num_slots,
    num_pair_slots=pairs.num_slots,
  )


def _rows(pipeline: Pipeline) -> _Rows:
  # In lockstep every entry of a list takes one tick. To find the ticks, the
  # timeline is computed with times that make every entry one second long. With
  # v chunks a stage's forward gets v seconds, so one chunk takes 1 s. If a
  # backward is split into two halves, it gets 2 v seconds.
  halves = 2 if pipeline.name == "zb_h1" else 1
  chunks = pipeline.chunks_per_stage
  starts_s = timeline(pipeline, TickTimes(chunks, halves * chunks)).starts_s
  return {
    (stage, tick): int(starts_s[stage][index])
    for stage, order in enumerate(pipeline.orders)
    for index, tick in enumerate(order)
  }


@dataclasses.dataclass(frozen=True, order=True)
class _Life:
  """The time for which one slot holds one piece of data.

  Attributes:
    put: Tick in which the slot is filled.
    read: Tick in which the slot is read. The slot is free after this tick.
    stage: Stage that has the slot.
  """

  put: int
  read: int
  stage: int


def _lives(row: _Rows, since: str, until: Iterable[str]) -> list[_Life]:
  """Returns the lives of data that a stage keeps between two of its actions.

  Args:
    row: Row of every entry.
    since: Action that puts the data into a slot, e.g. "forward".
    until: Actions on the same micro-batch and chunk that read the data.
  """
  return [
    _Life(row[stage, dataclasses.replace(tick, direction=since)], read, stage)
    for (stage, tick), read in row.items()
    if tick.direction in until
  ]


def _arriving(
  pipeline: Pipeline, row: _Rows, directions: Iterable[str]
) -> list[_Life]:
  """Returns the lives of data that arrives from another chunk.

  The data arrives one tick after the other chunk has computed it.

  Args:
    pipeline: The schedule.
    row: Row of every entry.
    directions: Actions that read the data.
  """
  return [
    _Life(row[source, needed] + 1, read, stage)
    for (stage, tick), read in row.items()
    if tick.direction in directions
    for source, needed in pipeline.dependencies(stage, tick)
    if needed.direction == tick.direction  # Another chunk sends it.
  ]


def _turning(pipeline: Pipeline, row: _Rows) -> list[_Life]:
  """Returns the lives of the outputs of the model's last chunk.

  The output of a forward stays on the last stage until the backward of the same
  micro-batch reads it.

  Args:
    pipeline: The schedule.
    row: Row of every entry.
  """
  last = pipeline.num_stages - 1, pipeline.chunks_per_stage - 1
  last_chunk_row = {
    (stage, tick): at
    for (stage, tick), at in row.items()
    if (stage, tick.chunk) == last
  }
  return _lives(last_chunk_row, "forward", _BACKWARDS)


class _Buffer:
  """Assigns slots to lives. Each life gets the first slot that is free.

  So a stage needs only as many slots as lives overlap in one tick. Example: the
  data that forwards save on the first stage of 1F1B with p = 2 and m = 3

      F0 in tick 0 to B0 in tick 3    slot 0
      F1 in tick 1 to B1 in tick 5    slot 1
      F2 in tick 4 to B2 in tick 7    slot 0, which is free after tick 3

  Two slots are enough. A slot that is read in tick 3 may be filled again in
  tick 4, but not in tick 3, because a tick may write before it reads.
  """

  def __init__(self, shape: tuple[int, int], lives: Iterable[_Life]):
    self._shape = shape
    self.lives = sorted(lives)
    self._slot = {}
    busy_until = [[] for _ in range(shape[1])]
    for life in self.lives:
      last_reads = busy_until[life.stage]
      free = (slot for slot, read in enumerate(last_reads) if read < life.put)
      slot = next(free, len(last_reads))
      last_reads[slot : slot + 1] = [life.read]
      self._slot[life] = slot
    self.num_slots = max(map(len, busy_until))

  def slots(
    self, put: Iterable[_Life] = (), read: Iterable[_Life] = ()
  ) -> np.ndarray:
    """Returns the slots of lives by tick and stage, [num_ticks, num_stages].

    Args:
      put: Lives whose slot number is written at the tick that fills the slot.
      read: Lives whose slot number is written at the tick that reads the slot.
    """
    slots = np.full(self._shape, self.num_slots, np.int32)
    for life in put:
      slots[life.put, life.stage] = self._slot[life]
    for life in read:
      slots[life.read, life.stage] = self._slot[life]
    return slots
