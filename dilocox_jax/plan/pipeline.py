"""The order in which pipeline stages compute micro-batches.

A *tick* is the forward or the backward pass of one micro-batch on one stage. A
schedule has a list of ticks for every stage. For example, with p = 2 stages and
m = 3 micro-batches, F for forward and B for backward:

    gpipe   stage 0   F0 F1 F2 B2 B1 B0
            stage 1   F0 F1 F2 B2 B1 B0
    1f1b    stage 0   F0 F1 B0 F2 B1 B2
            stage 1   F0 B0 F1 B1 F2 B2

The train step executes these lists in lockstep, by the rows of a table
(`TickNumbers`). The simulator times them without this lockstep (`timeline`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.checks import check_limits

PIPELINES = ("gpipe", "1f1b")
ACTIONS = ("idle", "forward", "backward")


class Tick(NamedTuple):
  """One forward or backward pass of a micro-batch on a stage.

  Attributes:
    action: "forward" or "backward".
    micro_batch: Index of the micro-batch, from 0.
  """

  action: str
  micro_batch: int


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """The schedule of one step's micro-batches over the stages of a replica.

  "gpipe" runs all forwards, and then all backwards, the last micro-batch first
  (Huang et al., 2018, arXiv 1811.06965, Figure 2c).

  "1f1b" runs up to p - s - 1 forwards on stage s, counted from 0. Then it
  alternates between forward and backward, until only backwards are left. So
  stage s keeps the data of at most p - s micro-batches (Narayanan et al., 2021,
  arXiv 2104.04473, section 2.2.1).

  Attributes:
    name: "gpipe" or "1f1b".
    num_stages: Number of stages, p.
    num_micro_batches: Number of micro-batches in an optimizer step, m.
  """

  name: str = dataclasses.field(metadata={"choices": PIPELINES})
  num_stages: int = dataclasses.field(metadata={"at_least": 1})
  num_micro_batches: int = dataclasses.field(metadata={"at_least": 1})

  def __post_init__(self):
    """Raises ValueError if a field is outside its limits."""
    check_limits(self)

  @property
  def num_saved_slots(self) -> int:
    """Largest number of micro-batches whose data a stage keeps at once.

    A stage keeps the data of a micro-batch from its forward to its backward.
    """
    if self.name == "gpipe":
      return self.num_micro_batches
    return min(self.num_micro_batches, self.num_stages)

  @property
  def num_output_slots(self) -> int:
    """Largest number of the model's outputs that the last stage keeps at once.

    Each output is kept from the forward to the backward of its micro-batch.
    """
    if self.name == "gpipe":
      return self.num_micro_batches
    return 1

  @property
  def timetable(self) -> "TickNumbers":
    """Table of the schedule, which the compiled program executes row by row.

    Every pass is in the earliest row that its dependencies and the order of its
    stage allow.
    """
    # If forward and backward take a second each, the start in seconds is the
    # row of the table.
    rows = timeline(self, forward_s=1, backward_s=1).start_s
    shape = (1 + int(max(rows.values())), self.num_stages)
    action = np.zeros(shape, np.int32)
    micro_batch = np.zeros(shape, np.int32)
    for (stage, tick), row in rows.items():
      action[int(row), stage] = ACTIONS.index(tick.action)
      micro_batch[int(row), stage] = tick.micro_batch
    return TickNumbers(
      action=action,
      micro_batch=micro_batch,
      saved_slot=micro_batch % self.num_saved_slots,
      output_slot=micro_batch % self.num_output_slots,
    )

  def order(self, stage: int) -> list[Tick]:
    """Returns the forward and backward passes of stage `stage`, in order."""
    batches = range(self.num_micro_batches)
    forwards = [Tick("forward", batch) for batch in batches]
    backwards = [Tick("backward", batch) for batch in batches]
    if self.name == "gpipe":
      return forwards + backwards[::-1]
    num_ahead = self.num_stages - stage - 1
    ticks = forwards[:num_ahead]
    for index, backward in enumerate(backwards, start=num_ahead):
      # After the last forward only backwards are left.
      if index < len(forwards):
        ticks.append(forwards[index])
      ticks.append(backward)
    return ticks

  def dependencies(self, stage: int, tick: Tick) -> list[tuple[int, Tick]]:
    """Lists the passes whose results the pass `tick` of stage `stage` needs.

    Each entry is a pair of a stage and a pass on this stage.
    """
    if tick.action == "forward":
      if stage == 0:
        return []
      return [(stage - 1, tick)]
    needed = [(stage, Tick("forward", tick.micro_batch))]
    if stage + 1 < self.num_stages:
      needed.append((stage + 1, tick))
    return needed


class Timeline(NamedTuple):
  """When every forward and backward pass of an optimizer step runs.

  Attributes:
    start_s: Start of each pass, by stage and `Tick` (seconds from the start of
      the step).
    step_s: Time from the start of the step until all stages are done (seconds).
    bubble_fraction: Share of `step_s` in which a stage has nothing to do, 0 to
      1. It is the same for all stages.
  """

  start_s: dict[tuple[int, Tick], float]
  step_s: float
  bubble_fraction: float


# Cached, because all replicas and many compared settings have one timeline.
@functools.lru_cache(maxsize=256)
def timeline(
  pipeline: Pipeline, forward_s: float, backward_s: float, hop_s: float = 0.0
) -> Timeline:
  """Computes when each forward and backward pass of an optimizer step runs.

  A pass runs as early as its dependencies and the order of its stage allow. The
  result is cached, so do not change its dict.

  Args:
    pipeline: The order of the passes on every stage.
    forward_s: Duration of a micro-batch's forward on one stage (seconds).
    backward_s: Duration of a micro-batch's backward on one stage (seconds).
    hop_s: Time in which activations reach the next stage, or a gradient the
      stage before (seconds). These transfers do not wait for each other.
  """
  durations_s = {"forward": forward_s, "backward": backward_s}
  remaining = [pipeline.order(stage) for stage in range(pipeline.num_stages)]
  free_s = [0.0] * pipeline.num_stages
  start_s = {}
  end_s = {}
  # Each stage runs its next passes until one of them depends on a pass that
  # has no time yet. Then the next stage has its turn.
  while any(remaining):
    for stage, ticks in enumerate(remaining):
      while ticks:
        needed = pipeline.dependencies(stage, ticks[0])
        if not all(dependency in end_s for dependency in needed):
          break
        tick_start_s = free_s[stage]
        for dependency in needed:
          ready_s = end_s[dependency]
          if dependency[0] != stage:
            ready_s += hop_s
          tick_start_s = max(tick_start_s, ready_s)
        tick = ticks.pop(0)
        tick_end_s = tick_start_s + durations_s[tick.action]
        start_s[stage, tick] = tick_start_s
        end_s[stage, tick] = tick_end_s
        free_s[stage] = tick_end_s
  busy_s = pipeline.num_micro_batches * (forward_s + backward_s)
  step_s = max(free_s)
  return Timeline(
    start_s=start_s, step_s=step_s, bubble_fraction=1 - busy_s / step_s
  )


class TickNumbers(NamedTuple):
  """Table of what each stage does when, and in which slots it keeps its data.

  All devices run one program, so the stages go through the rows of this table
  in lockstep. For example, 1F1B with p = 2 stages and m = 2 micro-batches takes
  six rows (F forward, B backward, a dot for an idle stage):

      row       0   1   2   3   4   5
      stage 0   F0  F1  .   B0  .   B1
      stage 1   .   F0  B0  F1  B1  .

  At the end of every row each stage sends its newest activations to the next
  stage, and its newest gradient to the stage before. A stage reads what it has
  received before newer data arrive. So one receive buffer for activations and
  one for gradients are enough.

  Attributes are int32 arrays [num_rows, num_stages].

  Attributes:
    action: Index into `ACTIONS`.
    micro_batch: Index of the micro-batch of the action; 0 when idle.
    saved_slot: Index of the slot where a forward puts the data that the
      backward of the same micro-batch reads.
    output_slot: Index of the slot where a forward puts its output. Only the
      last stage reads the slot: its backward starts from the output.
  """

  action: Any
  micro_batch: Any
  saved_slot: Any
  output_slot: Any
