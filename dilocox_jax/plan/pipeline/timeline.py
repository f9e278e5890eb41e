"""Pipeline schedules as values: dependencies, idle time and memory.

The train step executes a schedule's lists and the simulator turns the same
lists into tasks, so a predicted bubble is that of the program that runs. Step
time, bubble and activations held are computed from the lists; tests compare
them with the closed forms of the papers.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from dilocox_jax.checks import check_limits, limited
from dilocox_jax.plan.pipeline import orders
from dilocox_jax.plan.pipeline.orders import PIPELINES, Order, Tick


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """The schedule of one step's micro-batches over the stages of a replica.

  Chunk c of stage s is the k-th run of the model's layers, k = c p + s. With
  p = 4, chunk 1 of stage 2 has k = 6: it follows chunk 1 of stage 1 (k = 5).

  Attributes:
    name: One of `PIPELINES`.
    num_stages: Number of stages, p.
    num_micro_batches: Micro-batches in one step of the optimizer, m.
    chunks_per_stage: Chunks of layers that a stage has, v; above 1 for
      "interleaved" only.
    is_forward_only: Whether the lists have no backwards, as in an evaluation.
      Any number of micro-batches then goes with any schedule.
  """

  name: str = dataclasses.field(metadata={"choices": PIPELINES})
  num_stages: int = dataclasses.field(metadata={"at_least": 1})
  num_micro_batches: int = dataclasses.field(metadata={"at_least": 1})
  chunks_per_stage: int = limited(1, at_least=1)
  is_forward_only: bool = False

  def __post_init__(self):
    check_limits(self)
    if self.name == "interleaved":
      self._check_interleaved()
    elif self.chunks_per_stage > 1:
      raise ValueError(
        f"chunks_per_stage={self.chunks_per_stage} must be 1 for {self.name}: "
        f"only interleaved has more"
      )

  def _check_interleaved(self):
    if self.chunks_per_stage < 2:
      raise ValueError(
        f"chunks_per_stage={self.chunks_per_stage} must be at least 2 for "
        f"interleaved: with one chunk take 1f1b"
      )
    is_ragged = self.num_micro_batches % self.num_stages
    if is_ragged and not self.is_forward_only:
      raise ValueError(
        f"num_micro_batches={self.num_micro_batches} must be a multiple of "
        f"num_stages={self.num_stages} for interleaved"
      )

  @functools.cached_property
  def orders(self) -> tuple[Order, ...]:
    """The ticks of every stage in order; one list for each stage."""
    orders = tuple(self._order(stage) for stage in range(self.num_stages))
    if not self.is_forward_only:
      return orders
    return tuple(
      tuple(tick for tick in order if tick.direction == "forward")
      for order in orders
    )

  def forward_only(self, num_micro_batches: int) -> "Pipeline":
    """Returns the forwards of this schedule, for any number of micro-batches.

    Args:
      num_micro_batches: Number of micro-batches, m.
    """
    return dataclasses.replace(
      self, num_micro_batches=num_micro_batches, is_forward_only=True
    )

  def _order(self, stage: int) -> Order:
    sizes = self.num_stages, self.num_micro_batches
    if self.name == "gpipe":
      return orders.gpipe(self.num_micro_batches)
    if self.name == "1f1b":
      return orders.one_forward_one_backward(stage, *sizes)
    if self.name == "zb_h1":
      return orders.zb_h1(stage, *sizes)
    return orders.interleaved(stage, *sizes, self.chunks_per_stage)

  def dependencies(self, stage: int, tick: Tick) -> list[tuple[int, Tick]]:
    """Lists what must have ended before a tick may start.

    If the stage differs, an activation or its gradient has to travel.

    Args:
      stage: The stage whose list holds the tick.
      tick: The tick.
    """
    batch, chunk = tick.micro_batch, tick.chunk
    place = chunk * self.num_stages + stage  # Among all chunks of the model.
    if tick.direction == "weight_gradient":
      return [(stage, Tick("input_gradient", batch, chunk))]
    if tick.direction == "forward":
      return [self._at(place - 1, tick)] if place else []
    forward = stage, Tick("forward", batch, chunk)
    is_last = place + 1 == self.num_stages * self.chunks_per_stage
    return [forward] if is_last else [forward, self._at(place + 1, tick)]

  def _at(self, place: int, tick: Tick) -> tuple[int, Tick]:
    """Returns the same tick in another chunk of the model."""
    chunk, stage = divmod(place, self.num_stages)
    return stage, Tick(tick.direction, tick.micro_batch, chunk)


_WORK = {"above": 0, "below": math.inf}  # Limits of seconds of work.


@dataclasses.dataclass(frozen=True)
class TickTimes:
  """How long the work of one micro-batch takes; the same on all stages.

  Attributes:
    forward_s: Forward through all chunks of one stage (s).
    backward_s: Backward through all chunks of one stage (s).
    weight_gradient_share: Share of the backward, 0 to 1, that makes gradients
      of weights; the rest makes those of inputs, which other stages need.
    hop_s: Time from the end of a forward until another stage has its
      activations, and likewise for a gradient (s); hops do not wait for each
      other.
  """

  forward_s: float | int = dataclasses.field(metadata=_WORK)
  backward_s: float | int = dataclasses.field(metadata=_WORK)
  weight_gradient_share: float | int = limited(0.5, at_least=0, at_most=1)
  hop_s: float | int = limited(0.0, at_least=0, below=math.inf)

  def __post_init__(self):
    check_limits(self)

  def work_s(self, direction: str) -> float | int:
    """Returns the seconds of one direction over all chunks of a stage."""
    return {
      "forward": self.forward_s,
      "backward": self.backward_s,
      "input_gradient": self.backward_s * (1 - self.weight_gradient_share),
      "weight_gradient": self.backward_s * self.weight_gradient_share,
    }[direction]


@dataclasses.dataclass(frozen=True)
class PipelineTimeline:
  """When every tick of a step runs, in the order of the stages' lists.

  Attributes:
    starts_s: Starts of the ticks, a row for each stage (s from the start of
      the step).
    ends_s: Ends of the same ticks (s from the start of the step).
  """

  starts_s: Sequence[Sequence[float | int]]
  ends_s: Sequence[Sequence[float | int]]

  @property
  def step_s(self) -> float | int:
    """Time from the start of the step until the last stage is done (s)."""
    return max(max(row) for row in self.ends_s)

  @property
  def bubble_fraction(self) -> float:
    """Share of the stages' time in which they have nothing to do."""
    busy_s = sum(map(sum, self.ends_s)) - sum(map(sum, self.starts_s))
    return 1 - busy_s / (len(self.ends_s) * self.step_s)


# Every replica, and every setting that is compared, asks for the same one.
@functools.lru_cache(maxsize=256)
def timeline(pipeline: Pipeline, times: TickTimes) -> PipelineTimeline:
  """Runs each stage's list as early as its dependencies allow.

  Args:
    pipeline: The schedule.
    times: Seconds of the ticks; a chunk takes its share of the stage.
  """
  starts_s = [[] for _ in pipeline.orders]
  ends_s = [[] for _ in pipeline.orders]
  ended_s = {}
  advances = True
  while advances:
    advances = False
    for stage, order in enumerate(pipeline.orders):
      free_s = ends_s[stage][-1] if ends_s[stage] else 0.0
      while (place := len(ends_s[stage])) < len(order):
        tick = order[place]
        needed = pipeline.dependencies(stage, tick)
        if not all(at in ended_s for at in needed):
          break
        # What another stage has computed takes a hop to arrive.
        start_s = max(
          [free_s]
          + [ended_s[at] + times.hop_s * (at[0] != stage) for at in needed]
        )
        work_s = times.work_s(tick.direction)
        free_s = start_s + work_s / pipeline.chunks_per_stage
        starts_s[stage].append(start_s)
        ends_s[stage].append(free_s)
        ended_s[stage, tick] = free_s
        advances = True
  return PipelineTimeline(starts_s, ends_s)
