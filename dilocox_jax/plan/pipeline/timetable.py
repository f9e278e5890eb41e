"""A pipeline schedule as a table that one compiled program executes.

All devices run the same program, so a stage cannot follow its own list of work.
Instead all stages go through one table together, one row (tick) at a time.
Buffers have a fixed size, and the table says which slot is used in each tick.
This module computes the table as plain integers, so the train step makes no
decisions. A test replaces activations by numbers and checks that nothing is
read before it arrives or overwritten before it is read.

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

# Maps a stage and an entry of its list to the row in which the entry is done.
_Rows = dict[tuple[int, Tick], int]


@dataclasses.dataclass(frozen=True, eq=False)
class Timetable:
  """The action of each stage in each tick, and the slots that hold its data.

  Every array is int32 [num_ticks, num_stages]. The result of a tick is sent at
  its end and has arrived at the start of the next tick. Activations go to the
  next stage, and from the last stage to the next chunk of the first stage.
  Gradients go the other way. A slot number equal to the number of slots means
  no slot. A slot is free again after the tick that reads it.

  Attributes:
    action: Index into `ACTIONS`.
    micro_batch: Micro-batch of the action; 0 when idle.
    chunk: Chunk of the action; 0 when idle.
    saved_slot: Slot where a forward puts the activations that its backward
      needs. The backward or input gradient reads the same slot.
    activation_put: Inbox slot for the activations that arrived at the start
      of the tick; no slot if none arrived.
    activation_slot: Inbox slot that a forward reads, except for the first
      chunk of the model, which reads tokens.
    gradient_put: Inbox slot for the gradients that arrived at the start of
      the tick; no slot if none arrived.
    gradient_slot: Inbox slot that a backward or input gradient reads.
    turn_slot: Slot among the gradients where a forward of the model's last
      chunk puts its output, from which the backward of that chunk starts.
    pair_slot: Slot where an input gradient puts the values that its weight
      gradient needs. The weight gradient reads the same slot.
    num_saved_slots: Number of slots for `saved_slot`, on the stage that needs
      most. The three numbers below are also those of that stage.
    num_activation_slots: Number of slots for activations that have arrived.
    num_gradient_slots: Number of slots for gradients that have arrived and for
      outputs of the model's last chunk.
    num_pair_slots: Number of slots for `pair_slot`.
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
  def num_ticks(self) -> int:
    """Number of ticks in one step (rows of the table)."""
    return self.action.shape[0]

  @property
  def num_stages(self) -> int:
    """Number of stages of the pipeline (columns of the table)."""
    return self.action.shape[1]

  @property
  def num_chunks(self) -> int:
    """Number of chunks of layers that each stage holds."""
    return int(self.chunk.max()) + 1

  @property
  def idle_ticks(self) -> int:
    """Number of entries without an action, over all stages."""
    return int(np.sum(self.action == ACTIONS.index("idle")))

  @property
  def idle_fraction(self) -> float:
    """Share of the entries without an action."""
    return self.idle_ticks / self.action.size

  def tick_lengths_s(self, times: TickTimes) -> np.ndarray:
    """Computes the duration of every tick: its longest action and one hop.

    A hop sends results from stage to stage. Every tick ends with a hop, because
    the program always sends, even if there is nothing to send. With a single
    stage there are no hops.

    Args:
      times: Durations of a stage's actions and of hops (seconds). If a stage
        has v chunks, an action of one chunk takes 1 / v of the stage's time.

    Returns:
      Seconds, [num_ticks].
    """
    work_s = [0.0, *map(times.work_s, ACTIONS[1:])]
    taken_s = np.array(work_s, np.float64)[self.action] / self.num_chunks
    hop_s = max(times.forward_hop_s, times.backward_hop_s)
    return taken_s.max(axis=1) + (hop_s if self.num_stages > 1 else 0.0)

  def lockstep_step_s(self, times: TickTimes) -> float:
    """Computes the duration of one step in which all stages run in lockstep.

    In lockstep every stage waits at the end of a tick until all stages are
    done. In `timeline` a stage only waits for the data that it needs, so a step
    in lockstep never takes less time than there.

    Example: in 1F1B, once the pipeline is full, some stages do a forward in a
    tick while others do a backward. If a forward takes 1 s and a backward 2 s,
    such a tick takes 2 s. A micro-batch needs two of these ticks, so it takes
    4 s instead of 3 s.

    If hops take no time, lockstep is as fast as `timeline` for GPipe. For ZB-H1
    the same is true if a forward and both halves of a backward take equally
    long. On hardware where each stage waits only for its neighbours, the
    duration of a real step lies between the two results.

    Args:
      times: Durations of a stage's actions and of hops (seconds). If a stage
        has v chunks, an action of one chunk takes 1 / v of the stage's time.

    Returns:
      Seconds.
    """
    return float(self.tick_lengths_s(times).sum())


def timetable(pipeline: Pipeline) -> Timetable:
  """Builds the table, with every action as early as its dependencies allow.

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
  """Returns the row in which every entry of every stage's list is done."""
  # In lockstep every entry takes one tick. If every entry takes one second in a
  # timeline, an entry that starts at second k is in row k. A stage's forward is
  # given v seconds, since its v chunks share them. Its backward is given v
  # seconds, too, or 2 v if it is split into two halves.
  halves = 2 if pipeline.name == "zb_h1" else 1
  chunks = pipeline.chunks_per_stage
  starts_s = timeline(pipeline, TickTimes(chunks, halves * chunks)).starts_s
  return {
    (stage, tick): int(starts_s[stage][place])
    for stage, order in enumerate(pipeline.orders)
    for place, tick in enumerate(order)
  }


@dataclasses.dataclass(frozen=True, order=True)
class _Life:
  """The ticks at which a slot is filled and read, both included."""

  put: int
  read: int
  stage: int


def _lives(row: _Rows, since: str, until: Iterable[str]) -> list[_Life]:
  """Returns lives between two actions on the same micro-batch and chunk."""
  return [
    _Life(row[stage, dataclasses.replace(tick, direction=since)], read, stage)
    for (stage, tick), read in row.items()
    if tick.direction in until
  ]


def _arriving(
  pipeline: Pipeline, row: _Rows, directions: Iterable[str]
) -> list[_Life]:
  """Returns lives from the arrival of data to the action that reads it.

  The result of tick k arrives in tick k + 1.
  """
  return [
    _Life(row[source, needed] + 1, read, stage)
    for (stage, tick), read in row.items()
    if tick.direction in directions
    for source, needed in pipeline.dependencies(stage, tick)
    if needed.direction == tick.direction  # Another chunk sent it.
  ]


def _turning(pipeline: Pipeline, row: _Rows) -> list[_Life]:
  """Returns lives from a forward of the model's last chunk to its backward."""
  last = pipeline.num_stages - 1, pipeline.chunks_per_stage - 1
  ends = {key: at for key, at in row.items() if (key[0], key[1].chunk) == last}
  return _lives(ends, "forward", _BACKWARDS)


class _Buffer:
  """Assigns slots to lives. Each life gets the first slot that is free.

  A stage never needs more slots than the number of its lives that overlap in
  one tick. On the first stage of 1F1B with p = 2 and m = 3, the activations
  that forwards save have these lives:

      F0 in tick 0 to B0 in tick 3    slot 0
      F1 in tick 1 to B1 in tick 5    slot 1
      F2 in tick 4 to B2 in tick 7    slot 0, which is free after tick 3

  So two slots are enough. A slot that is read in tick 3 may be filled again in
  tick 4 and not in tick 3, since a tick may write before it reads.
  """

  def __init__(self, shape: tuple[int, int], lives: Iterable[_Life]):
    self._shape = shape
    self.lives = sorted(lives)
    self._slot = {}
    busy_until = [[] for _ in range(shape[1])]
    for life in self.lives:
      ends = busy_until[life.stage]
      free = (slot for slot, end in enumerate(ends) if end < life.put)
      slot = next(free, len(ends))
      ends[slot : slot + 1] = [life.read]
      self._slot[life] = slot
    self.num_slots = max(map(len, busy_until))

  def slots(
    self, put: Iterable[_Life] = (), read: Iterable[_Life] = ()
  ) -> np.ndarray:
    """Returns the slots of lives by tick and stage, [num_ticks, num_stages].

    Args:
      put: Lives whose slot is written into the row of the tick that fills it.
      read: Lives whose slot is written into the row of the tick that reads it.
    """
    slots = np.full(self._shape, self.num_slots, np.int32)
    for life in put:
      slots[life.put, life.stage] = self._slot[life]
    for life in read:
      slots[life.read, life.stage] = self._slot[life]
    return slots
