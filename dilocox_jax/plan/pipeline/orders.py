"""The order in which each pipeline schedule runs a stage's micro-batches.

A schedule is one list of ticks for every stage. Which tick waits for which
follows from the model, and how long a tick takes follows from the devices. The
train step executes these lists and the simulator times them, so both have the
same order.

With p = 2 stages and m = 3 micro-batches, F for forward and B for backward:

    gpipe   stage 0   F0 F1 F2 B2 B1 B0
            stage 1   F0 F1 F2 B2 B1 B0
    1f1b    stage 0   F0 F1 B0 F2 B1 B2
            stage 1   F0 B0 F1 B1 F2 B2
"""

import dataclasses
from collections.abc import Iterator, Sequence

PIPELINES = ("gpipe", "1f1b", "interleaved", "zb_h1")


@dataclasses.dataclass(frozen=True, order=True)
class Tick:
  """The work of a stage at one place of its list.

  Attributes:
    direction: "forward", "backward", or one half of a backward:
      "input_gradient" or "weight_gradient".
    micro_batch: Index of the micro-batch, from 0.
    chunk: Index of the chunk among the stage's chunks of layers, from 0.
  """

  direction: str
  micro_batch: int
  chunk: int = 0


Order = tuple[Tick, ...]


def gpipe(num_micro_batches: int) -> Order:
  """Lists every forward, then every backward, the last micro-batch first.

  This is the order in which one differentiates all forwards together. It is
  the same on all stages.

  Source: Huang et al., 2018, GPipe, arXiv 1811.06965, Figure 2c.
  """
  forwards = [Tick("forward", batch) for batch in range(num_micro_batches)]
  backwards = [Tick("backward", tick.micro_batch) for tick in forwards]
  return (*forwards, *reversed(backwards))


def one_forward_one_backward(
  stage: int,
  num_stages: int,
  num_micro_batches: int,
  backward: str = "backward",
) -> Order:
  """Lists forwards that fill the later stages, then forward and backward.

  Stage s runs p - s - 1 forwards ahead, so that when it has done one more, the
  gradient of its first micro-batch can be on the way back.

  Source: Narayanan et al., 2019, PipeDream, for the order; with a flush at
  the end of the step, Narayanan et al., 2021, arXiv 2104.04473, section 2.2.1.

  Args:
    stage: Index of the stage, from 0.
    num_stages: Number of stages, p.
    num_micro_batches: Number of micro-batches of a step, m.
    backward: Direction that the backward ticks have.
  """
  batches = range(num_micro_batches)
  return tuple(
    _alternating(
      [Tick("forward", batch) for batch in batches],
      [Tick(backward, batch) for batch in batches],
      num_stages - stage - 1,
    )
  )


def interleaved(
  stage: int, num_stages: int, num_micro_batches: int, chunks_per_stage: int
) -> Order:
  """Lists 1F1B over v chunks for each stage, in groups of p micro-batches.

  A group of micro-batches passes through one chunk of every stage, then
  through the next chunk. A chunk takes a v-th of a stage's time, so the
  pipeline fills in a v-th of the time. With p = 2 and v = 2, stage 0 begins
  with micro-batches 0 and 1 through chunk 0, then 0 and 1 through chunk 1.

  Source: Narayanan et al., 2021, arXiv 2104.04473, section 2.2.2, has the
  idea; the number of forwards ahead, 2 (p - stage - 1) + (v - 1) p, is that
  of Megatron-LM.

  Args:
    stage: Index of the stage, from 0.
    num_stages: Number of stages, p.
    num_micro_batches: Number of micro-batches of a step, m. It must be a
      multiple of p, unless only the forwards are read.
    chunks_per_stage: Number of chunks of a stage, v.
  """
  forwards = [
    Tick("forward", group + batch, chunk)
    for group in range(0, num_micro_batches, num_stages)
    for chunk in range(chunks_per_stage)
    for batch in range(min(num_stages, num_micro_batches - group))
  ]
  backwards = [
    Tick("backward", tick.micro_batch, chunks_per_stage - 1 - tick.chunk)
    for tick in forwards
  ]
  # p = 4, v = 2: stage 0 runs 6 + 4 = 10 forwards ahead, stage 3 runs 4.
  filling = 2 * (num_stages - stage - 1) + (chunks_per_stage - 1) * num_stages
  return tuple(_alternating(forwards, backwards, filling))


def zb_h1(stage: int, num_stages: int, num_micro_batches: int) -> Order:
  """Lists 1F1B with delayed weight gradients: on stage s, s micro-batches late.

  Input gradients then reach earlier stages sooner, and the weight gradients
  that are left fill the end of the step, where 1F1B is idle. Every stage holds
  the activations of p micro-batches, as many as the first stage in 1F1B.

  Source: Qi et al., 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241,
  section 2.1 and the upper half of Figure 3.

  Args:
    stage: Index of the stage, from 0.
    num_stages: Number of stages, p.
    num_micro_batches: Number of micro-batches of a step, m.
  """
  ticks = []
  for tick in one_forward_one_backward(
    stage, num_stages, num_micro_batches, "input_gradient"
  ):
    ticks.append(tick)
    if tick.direction == "input_gradient" and tick.micro_batch >= stage:
      ticks.append(Tick("weight_gradient", tick.micro_batch - stage))
  # Stage 2 of m = 5: W0, W1, W2 follow I2, I3, I4; W3 and W4 are left.
  left = range(max(0, num_micro_batches - stage), num_micro_batches)
  return (*ticks, *(Tick("weight_gradient", batch) for batch in left))


def _alternating(
  forwards: Sequence[Tick], backwards: Sequence[Tick], num_ahead: int
) -> Iterator[Tick]:
  """Yields `num_ahead` forwards, then forwards and backwards in turn."""
  yield from forwards[:num_ahead]
  for place, backward in enumerate(backwards, start=num_ahead):
    yield from forwards[place : place + 1]
    yield backward
