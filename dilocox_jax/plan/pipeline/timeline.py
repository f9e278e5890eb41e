"""Pipeline schedules as values: who waits for whom, idle time, and memory.

The train step executes a schedule's lists and the simulator lowers the same
lists to tasks, so a predicted bubble is that of the program that runs. What
the literature states in closed form - step time, bubble, activations held -
is computed here from the lists themselves; the closed form stands beside it
as the second opinion.
"""

import dataclasses
import functools
import math

from dilocox_jax.plan.pipeline import orders
from dilocox_jax.plan.pipeline.orders import PIPELINES, Order, Tick


@dataclasses.dataclass(frozen=True)
class Pipeline:
  """A schedule of one step's micro-batches over the stages of a replica.

  Chunk c of stage s is part k = c p + s of the model, in order of its layers;
  with one chunk a stage, part and stage are the same.

  Attributes:
    name: One of `PIPELINES`.
    num_stages: p.
    num_micro_batches: m, in one step of the optimizer.
    chunks_per_stage: v; above 1 for "interleaved" only.
  """

  name: str
  num_stages: int
  num_micro_batches: int
  chunks_per_stage: int = 1

  def __post_init__(self):
    if self.name not in PIPELINES:
      choices = ", ".join(PIPELINES)
      raise ValueError(f"name={self.name!r} must be one of {choices}")
    for field in ("num_stages", "num_micro_batches", "chunks_per_stage"):
      if getattr(self, field) < 1:
        raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
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
    if self.num_micro_batches % self.num_stages:
      raise ValueError(
        f"num_micro_batches={self.num_micro_batches} must be a multiple of "
        f"num_stages={self.num_stages} for interleaved"
      )

  @functools.cached_property
  def orders(self) -> tuple[Order, ...]:
    """What every stage does, in order; one list per stage."""
    return tuple(self._order(stage) for stage in range(self.num_stages))

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
    """What must have ended before a tick may start, as stages and ticks.

    Where the stage differs, an activation or its gradient has to travel.

    Args:
      stage: The stage whose list holds the tick.
      tick: The tick.
    """
    batch, chunk = tick.micro_batch, tick.chunk
    part = chunk * self.num_stages + stage
    if tick.direction == "weight_gradient":
      return [(stage, Tick("input_gradient", batch, chunk))]
    if tick.direction == "forward":
      return [self._at(part - 1, tick)] if part else []
    own = stage, Tick("forward", batch, chunk)
    is_last = part + 1 == self.num_stages * self.chunks_per_stage
    return [own] if is_last else [own, self._at(part + 1, tick)]

  def _at(self, part: int, tick: Tick) -> tuple[int, Tick]:
    """The same tick in another part of the model."""
    chunk, stage = divmod(part, self.num_stages)
    return stage, Tick(tick.direction, tick.micro_batch, chunk)


@dataclasses.dataclass(frozen=True)
class TickTimes:
  """How long the work of one micro-batch takes; alike on all stages.

  Attributes:
    forward_s: All chunks of one stage, forward (s).
    backward_s: All chunks of one stage, backward (s).
    weight_gradient_share: Part of the backward that only makes gradients of
      weights, 0 to 1; the rest makes those of inputs, which others wait for.
    forward_hop_s: From the end of a forward until another stage has its
      activations (s); hops do not wait for each other.
    backward_hop_s: The same for gradients on their way back (s).
  """

  forward_s: float | int
  backward_s: float | int
  weight_gradient_share: float | int = 0.5
  forward_hop_s: float | int = 0.0
  backward_hop_s: float | int = 0.0

  def __post_init__(self):
    for field in ("forward_s", "backward_s"):
      value = getattr(self, field)
      if not 0 < value < math.inf:
        raise ValueError(f"{field}={value} must be positive and finite (s)")
    for field in ("forward_hop_s", "backward_hop_s"):
      value = getattr(self, field)
      if not 0 <= value < math.inf:
        raise ValueError(f"{field}={value} must be finite, 0 or more (s)")
    if not 0 <= self.weight_gradient_share <= 1:
      raise ValueError(
        f"weight_gradient_share={self.weight_gradient_share} must lie between "
        f"0 and 1"
      )

  def work_s(self, direction: str) -> float | int:
    """Seconds of one direction of `Tick`, over all chunks of a stage."""
    return {
      "forward": self.forward_s,
      "backward": self.backward_s,
      "input_gradient": self.backward_s * (1 - self.weight_gradient_share),
      "weight_gradient": self.backward_s * self.weight_gradient_share,
    }[direction]

  def hop_s(self, direction: str) -> float | int:
    """Seconds for what a tick of this direction hands to another stage."""
    return self.forward_hop_s if direction == "forward" else self.backward_hop_s


@dataclasses.dataclass(frozen=True)
class PipelineTimeline:
  """When every tick of a step runs; rows and places are those of the orders.

  Attributes:
    starts_s: One row per stage (s, from the start of the step).
    ends_s: The same for the ends.
  """

  starts_s: tuple[tuple[float | int, ...], ...]
  ends_s: tuple[tuple[float | int, ...], ...]

  @property
  def step_s(self) -> float | int:
    """From the start of the step until the last stage is done (s)."""
    return max(max(row) for row in self.ends_s)

  @property
  def bubble_fraction(self) -> float:
    """Share of the stages' time in which they have nothing to do."""
    busy_s = sum(map(sum, self.ends_s)) - sum(map(sum, self.starts_s))
    return 1 - busy_s / (len(self.ends_s) * self.step_s)


def timeline(
  pipeline: Pipeline,
  times: TickTimes,
  orders: tuple[Order, ...] | None = None,
) -> PipelineTimeline:
  """Runs each stage's list as early as its dependencies allow.

  Args:
    pipeline: The schedule.
    times: What a tick takes; a chunk takes its share of the stage.
    orders: The same ticks in another order, one list per stage; the
      schedule's own if None.

  Raises:
    ValueError: If the stages wait for each other for ever.
  """
  orders = pipeline.orders if orders is None else orders
  num_chunks = pipeline.chunks_per_stage
  starts_s = [[] for _ in orders]
  ends_s = [[] for _ in orders]
  ended_s = {}
  advances = True
  while advances:
    advances = False
    for stage, order in enumerate(orders):
      free_s = ends_s[stage][-1] if ends_s[stage] else 0.0
      while (place := len(ends_s[stage])) < len(order):
        tick = order[place]
        ready_s = _ready_s(pipeline, times, stage, tick, ended_s)
        if ready_s is None:
          break
        start_s = max(free_s, ready_s)
        free_s = start_s + times.work_s(tick.direction) / num_chunks
        starts_s[stage].append(start_s)
        ends_s[stage].append(free_s)
        ended_s[stage, tick] = free_s
        advances = True
  for stage, order in enumerate(orders):
    if len(ends_s[stage]) < len(order):
      raise ValueError(
        f"orders of {pipeline.name} deadlock: stage {stage} waits for ever to "
        f"run {order[len(ends_s[stage])]}"
      )
  return PipelineTimeline(
    tuple(map(tuple, starts_s)), tuple(map(tuple, ends_s))
  )


def _ready_s(
  pipeline: Pipeline,
  times: TickTimes,
  stage: int,
  tick: Tick,
  ended_s: dict[tuple[int, Tick], float | int],
) -> float | int | None:
  """When all that a tick needs has arrived; None if that is not known yet."""
  ready_s = 0.0
  for source, needed in pipeline.dependencies(stage, tick):
    if (source, needed) not in ended_s:
      return None
    hop_s = times.hop_s(needed.direction) if source != stage else 0.0
    ready_s = max(ready_s, ended_s[source, needed] + hop_s)
  return ready_s


def peak_activations(pipeline: Pipeline) -> tuple[int, ...]:
  """Most activations that each stage holds at once.

  Counted in micro-batches of one chunk, which are a v-th of a stage's layers,
  from the start of a forward until its backward - where that is split, its
  weight gradient - has ended.
  """
  peaks = []
  for order in pipeline.orders:
    live = peak = 0
    for tick in order:
      live += tick.direction == "forward"
      peak = max(peak, live)
      live -= tick.direction in ("backward", "weight_gradient")
    peaks.append(peak)
  return tuple(peaks)


def closed_form_step_s(pipeline: Pipeline, times: TickTimes) -> float | int:
  """Seconds of a step without hops, from a formula instead of the lists.

  With F, B, I and W for forward, backward and its halves: GPipe and 1F1B take
  (m + p - 1)(F + B), interleaved m (F + B) + (p - 1)(F + B) / v, and ZB-H1
  m (F + B) + (p - 1)(F + I) - (min(m, p) - 1) min(F, I, W). All are exact.

  Source: GPipe, arXiv 1811.06965; arXiv 2104.04473, sections 2.2.1 and 2.2.2;
  ZB-H1, arXiv 2401.10241, Table 2: a bubble of (p - 1)(F + I - W).
  Differs: the table's bubble is this one for m >= p and W <= min(F, I) only.
  With fewer micro-batches fewer weight gradients are left to fill it, and one
  that is longer than a forward or an input gradient delays those behind it.

  Raises:
    ValueError: If an activation or a gradient takes time to travel.
  """
  for field in ("forward_hop_s", "backward_hop_s"):
    if getattr(times, field):
      raise ValueError(
        f"{field}={getattr(times, field)} must be 0 for a closed form"
      )
  filling = pipeline.num_stages - 1
  both_s = times.forward_s + times.backward_s
  work_s = pipeline.num_micro_batches * both_s
  if pipeline.name != "zb_h1":
    return work_s + filling * both_s / pipeline.chunks_per_stage
  input_s = times.work_s("input_gradient")
  weight_s = times.work_s("weight_gradient")
  filled = min(pipeline.num_micro_batches, pipeline.num_stages) - 1
  saved_s = filled * min(times.forward_s, input_s, weight_s)
  return work_s + filling * (times.forward_s + input_s) - saved_s
