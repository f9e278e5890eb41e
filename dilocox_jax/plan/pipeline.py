"""The order in which pipeline stages compute micro-batches.

A schedule is one list of ticks for every stage. Which tick waits for which
follows from the model, and how long a tick takes follows from the devices. The
simulator times these lists (`timeline`), and the train step executes them
(`timetable`), so a predicted bubble is that of the program that runs.

With p = 2 stages and m = 3 micro-batches, F for forward and B for backward:

    gpipe   stage 0   F0 F1 F2 B2 B1 B0
            stage 1   F0 F1 F2 B2 B1 B0
    1f1b    stage 0   F0 F1 B0 F2 B1 B2
            stage 1   F0 B0 F1 B1 F2 B2
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from dilocox_jax.checks import check_limits

PIPELINES = ("gpipe", "1f1b")
ACTIONS = ("idle", "forward", "backward")


class Tick(NamedTuple):
  """The work of a stage at one place of its list.

  Attributes:
    action: "forward" or "backward".
    micro_batch: Index of the micro-batch, from 0.
  """

  action: str
  micro_batch: int


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """The schedule of one step's micro-batches over the stages of a replica.

  "gpipe" runs every forward, then every backward, the last micro-batch first
  (Huang et al., 2018, arXiv 1811.06965, Figure 2c). In "1f1b" stage s runs p -
  s - 1 forwards ahead, then forward and backward in turn, so it keeps at most p
  - s micro-batches (Narayanan et al., 2019, PipeDream, for the order; with a
  flush at the end of the step: 2021, arXiv 2104.04473, section 2.2.1).

  Attributes:
    name: One of `PIPELINES`.
    num_stages: Number of stages, p.
    num_micro_batches: Micro-batches in one step of the optimizer, m.
  """

  name: str = dataclasses.field(metadata={"choices": PIPELINES})
  num_stages: int = dataclasses.field(metadata={"at_least": 1})
  num_micro_batches: int = dataclasses.field(metadata={"at_least": 1})

  def __post_init__(self):
    check_limits(self)

  @property
  def num_saved_slots(self) -> int:
    """Micro-batches whose data a stage keeps for backwards, at most."""
    batches = self.num_micro_batches
    return batches if self.name == "gpipe" else min(batches, self.num_stages)

  @property
  def num_output_slots(self) -> int:
    """Micro-batches whose outputs wait on the last stage, at most."""
    return self.num_micro_batches if self.name == "gpipe" else 1

  @property
  def timetable(self) -> "TickNumbers":
    """Table of the schedule that one compiled program executes.

    Every action is done in the earliest tick that its dependencies allow.
    """
    start_s = timeline(self, 1, 1).start_s
    shape = 1 + int(max(start_s.values())), self.num_stages
    action, micro_batch = np.zeros((2, *shape), np.int32)
    for (stage, tick), row in start_s.items():
      action[int(row), stage] = ACTIONS.index(tick.action)
      micro_batch[int(row), stage] = tick.micro_batch
    return TickNumbers(
      action,
      micro_batch,
      saved_slot=micro_batch % self.num_saved_slots,
      output_slot=micro_batch % self.num_output_slots,
    )

  def order(self, stage: int) -> list[Tick]:
    """Returns the ticks of a stage in order."""
    batches = range(self.num_micro_batches)
    forwards = [Tick("forward", batch) for batch in batches]
    backwards = [Tick("backward", batch) for batch in batches]
    if self.name == "gpipe":
      return forwards + backwards[::-1]
    num_ahead = self.num_stages - stage - 1
    ticks = forwards[:num_ahead]
    for place, backward in enumerate(backwards, start=num_ahead):
      ticks += [*forwards[place : place + 1], backward]
    return ticks

  def dependencies(self, stage: int, tick: Tick) -> list[tuple[int, Tick]]:
    """Lists stages and ticks that must have ended before a tick may start.

    If the stage differs, an activation or its gradient has to travel.

    Args:
      stage: The stage whose list holds the tick.
      tick: The tick.
    """
    if tick.action == "forward":
      return [(stage - 1, tick)] if stage else []
    needed = [(stage, Tick("forward", tick.micro_batch))]
    is_last = stage + 1 == self.num_stages
    return needed if is_last else [*needed, (stage + 1, tick)]


class Timeline(NamedTuple):
  """When every tick of a step runs.

  Attributes:
    start_s: Start of each tick, by stage and tick (s from the start of the
      step).
    step_s: Time from the start of the step until the last stage is done (s).
    bubble_fraction: Share of the stages' time in which they have nothing to do.
  """

  start_s: dict[tuple[int, Tick], float]
  step_s: float
  bubble_fraction: float


# Every replica, and every setting that is compared, asks for the same one.
@functools.lru_cache(maxsize=256)
def timeline(
  pipeline: Pipeline, forward_s: float, backward_s: float, hop_s: float = 0.0
) -> Timeline:
  """Runs each stage's list as early as its dependencies allow.

  Args:
    pipeline: The schedule.
    forward_s: Forward of a micro-batch through one stage (s).
    backward_s: Backward of a micro-batch through one stage (s).
    hop_s: Time from the end of a forward until another stage has its
      activations, and likewise for a gradient (s); hops do not wait for each
      other.
  """
  work_s = {"forward": forward_s, "backward": backward_s}
  left = [pipeline.order(stage) for stage in range(pipeline.num_stages)]
  free_s = [0.0] * pipeline.num_stages
  start_s, end_s = {}, {}
  while any(left):
    for stage, ticks in enumerate(left):
      while ticks:
        needed = pipeline.dependencies(stage, ticks[0])
        if not all(at in end_s for at in needed):
          break
        # What another stage has computed takes a hop to arrive.
        ready_s = [end_s[at] + hop_s * (at[0] != stage) for at in needed]
        key = stage, ticks.pop(0)
        start_s[key] = max(free_s[stage], *ready_s, 0.0)
        end_s[key] = free_s[stage] = start_s[key] + work_s[key[1].action]
  busy_s = pipeline.num_micro_batches * (forward_s + backward_s)
  step_s = max(free_s)
  return Timeline(start_s, step_s, 1 - busy_s / step_s)


class TickNumbers(NamedTuple):
  """What each stage does in each tick, and the buffer slots of its data.

  All devices run the same program, so a stage cannot follow a list of its own:
  the stages move in lockstep, one row of this table at a time. 1F1B with p = 2
  stages and m = 2 micro-batches takes six ticks:

      tick      0   1   2   3   4   5
      stage 0   F0  F1  .   B0  .   B1
      stage 1   .   F0  B0  F1  B1  .

  Arrays are int32 [num_ticks, num_stages]. At the end of every tick each stage
  sends its newest activations to the next stage, and its newest gradient to the
  one before. Both schedules read them before newer ones arrive.

  Attributes:
    action: Index into `ACTIONS`.
    micro_batch: Micro-batch of the action; 0 when idle.
    saved_slot: Slot where a forward puts the data that its backward reads.
    output_slot: Slot where a forward puts its output. The backward of the last
      stage starts from it.
  """

  action: Any
  micro_batch: Any
  saved_slot: Any
  output_slot: Any
