"""A pipeline schedule as a table that one compiled program can walk.

Devices that run the same program cannot each follow a list of their own: they
move in lockstep, a row of this table at a time, and every buffer they touch
has a fixed size and a slot number known beforehand. Working both out here, as
plain integers, keeps the train step free of scheduling, and lets the whole
protocol - nothing read too early, nothing overwritten too soon - be tested by
a machine that moves tags instead of activations.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from dilocox_jax.plan.pipeline.orders import Tick
from dilocox_jax.plan.pipeline.timeline import Pipeline, TickTimes, timeline

ACTIONS = ("idle", "forward", "backward", "input_gradient", "weight_gradient")

_BACKWARDS = ("backward", "input_gradient")  # Those that others wait for.


# In which tick a stage does an entry of its list.
_Rows = dict[tuple[int, Tick], int]


@dataclasses.dataclass(frozen=True, eq=False)
class Timetable:
  """Who does what in which tick, and where it lies meanwhile.

  Every array is int32 [num_ticks, num_stages]. What a tick makes is sent at
  its end and has arrived at the start of the next: activations of part k go
  to part k + 1, so to the stage after, from the last stage round to the
  first; gradients go the other way. A slot number equal to its count means
  none. A slot is free again after the tick that reads it.

  Attributes:
    action: Index into `ACTIONS`.
    micro_batch: Of the action; 0 when idle.
    chunk: Of the action; 0 when idle.
    saved_slot: Where a forward puts what its backward needs, and where the
      backward or input gradient finds it.
    activation_put: Inbox slot that keeps the activations which arrived at
      the start of the tick; none if nothing did.
    activation_slot: Inbox slot that a forward of any part but the first reads.
    gradient_put: The same as `activation_put` for gradients.
    gradient_slot: Inbox slot that a backward or input gradient reads.
    turn_slot: Where a forward of the last part of the model puts its output,
      among the gradients: the backward of that part starts from it.
    pair_slot: Where an input gradient puts what its weight gradient needs,
      and where that finds it.
    num_saved_slots: Slots of `saved_slot`, on the stage that needs most.
    num_activation_slots: The same for activations that have arrived.
    num_gradient_slots: The same for gradients and turned activations.
    num_pair_slots: The same for `pair_slot`.
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
    """Rows of the table: ticks of one step."""
    return self.action.shape[0]

  @property
  def num_stages(self) -> int:
    """Columns: stages of the pipeline."""
    return self.action.shape[1]

  @property
  def num_chunks(self) -> int:
    """Chunks of layers that each stage holds."""
    return int(self.chunk.max()) + 1

  @property
  def idle_ticks(self) -> int:
    """Places without an action, over all stages."""
    return int(np.sum(self.action == ACTIONS.index("idle")))

  @property
  def idle_fraction(self) -> float:
    """Share of the places without an action."""
    return self.idle_ticks / self.action.size

  def tick_lengths_s(self, times: TickTimes) -> np.ndarray:
    """Seconds of every tick, [num_ticks]: of its longest action and a hop.

    The hop is paid in every tick, since the exchange at its end is part of
    the program whether or not something useful is sent. One stage alone has
    nobody to send to.

    Args:
      times: What an action takes; a chunk takes its share of the stage.
    """
    work_s = [0.0, *map(times.work_s, ACTIONS[1:])]
    taken_s = np.array(work_s, np.float64)[self.action] / self.num_chunks
    hop_s = max(times.forward_hop_s, times.backward_hop_s)
    return taken_s.max(axis=1) + (hop_s if self.num_stages > 1 else 0.0)

  def lockstep_step_s(self, times: TickTimes) -> float:
    """Seconds of a step if no stage starts a tick before all ended the last.

    Never less than `timeline` says of stages that run freely. A tick in which
    some go forward while others go backward lasts as long as the backward. In
    1F1B that is every tick between filling and draining, so where a backward
    takes two forwards, a micro-batch costs four forwards there, not three.
    Without hops GPipe loses nothing, nor does ZB-H1 where forwards and both
    halves of a backward take as long. Stages wait for their neighbours only,
    so where sends are pairwise, a real step lies between the two.

    Args:
      times: What an action takes; a chunk takes its share of the stage.
    """
    return float(self.tick_lengths_s(times).sum())


def timetable(pipeline: Pipeline) -> Timetable:
  """Every stage's list in lockstep, as early as earlier ticks allow.

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
  # Lockstep is a step in which every entry takes one second.
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
  """How long a slot is needed: both ticks included."""

  put: int
  read: int
  stage: int


def _lives(row: _Rows, since: str, until: Iterable[str]) -> list[_Life]:
  """From one action on a micro-batch and chunk to another on the same."""
  return [
    _Life(row[stage, dataclasses.replace(tick, direction=since)], read, stage)
    for (stage, tick), read in row.items()
    if tick.direction in until
  ]


def _arriving(
  pipeline: Pipeline, row: _Rows, directions: Iterable[str]
) -> list[_Life]:
  """From an arrival, one tick after it was made, to the tick that reads it."""
  return [
    _Life(row[source, needed] + 1, read, stage)
    for (stage, tick), read in row.items()
    if tick.direction in directions
    for source, needed in pipeline.dependencies(stage, tick)
    if needed.direction == tick.direction  # Of another part, so it was sent.
  ]


def _turning(pipeline: Pipeline, row: _Rows) -> list[_Life]:
  """From a forward of the model's last part to its backward."""
  last = pipeline.num_stages - 1, pipeline.chunks_per_stage - 1
  ends = {key: at for key, at in row.items() if (key[0], key[1].chunk) == last}
  return _lives(ends, "forward", _BACKWARDS)


class _Buffer:
  """As few slots as lives that overlap allow: the first that is free."""

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
    """The slots of some lives, where they begin and where they end."""
    slots = np.full(self._shape, self.num_slots, np.int32)
    for life in put:
      slots[life.put, life.stage] = self._slot[life]
    for life in read:
      slots[life.read, life.stage] = self._slot[life]
    return slots
