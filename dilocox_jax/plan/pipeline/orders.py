"""The order in which each pipeline schedule runs a stage's micro-batches.

A schedule is nothing but a list for every stage: who waits for whom follows
from the model, and how long it takes from the devices. So the lists stand
here by themselves, as plain values that a train step can execute and a
simulator can time, and neither has an order of its own that might differ.
"""

import dataclasses
from collections.abc import Iterator, Sequence

PIPELINES = ("gpipe", "1f1b", "interleaved", "zb_h1")


@dataclasses.dataclass(frozen=True, order=True)
class Tick:
  """What a stage does at one place of its list.

  Attributes:
    direction: "forward", "backward", or one of the halves of a backward,
      "input_gradient" and "weight_gradient".
    micro_batch: Index of the micro-batch, from 0.
    chunk: Which of the stage's chunks of layers, from 0.
  """

  direction: str
  micro_batch: int
  chunk: int = 0


Order = tuple[Tick, ...]


def gpipe(num_micro_batches: int) -> Order:
  """Every forward, then every backward, the last micro-batch first.

  The order of differentiating all forwards as one; alike on all stages.

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
  """Just enough forwards to fill the stages below, then forward by backward.

  Source: Narayanan et al., 2019, PipeDream, for the order; with a flush at
  the end of the step, Narayanan et al., 2021, arXiv 2104.04473, section 2.2.1.

  Args:
    stage: Which stage, from 0.
    num_stages: p.
    num_micro_batches: m.
    backward: Direction of the ticks that go backward.
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
  """1F1B over v chunks a stage, in groups of p micro-batches.

  A group passes through one chunk of every stage, then through the next, so
  that the pipeline fills in a v-th of the time.

  Source: Narayanan et al., 2021, arXiv 2104.04473, section 2.2.2, has the
  idea; the number of forwards ahead, 2 (p - stage - 1) + (v - 1) p, is that
  of Megatron-LM.

  Args:
    stage: Which stage, from 0.
    num_stages: p.
    num_micro_batches: m, a multiple of p.
    chunks_per_stage: v.
  """
  forwards = [
    Tick("forward", group + batch, chunk)
    for group in range(0, num_micro_batches, num_stages)
    for chunk in range(chunks_per_stage)
    for batch in range(num_stages)
  ]
  backwards = [
    Tick("backward", tick.micro_batch, chunks_per_stage - 1 - tick.chunk)
    for tick in forwards
  ]
  filling = 2 * (num_stages - stage - 1) + (chunks_per_stage - 1) * num_stages
  return tuple(_alternating(forwards, backwards, filling))


def zb_h1(stage: int, num_stages: int, num_micro_batches: int) -> Order:
  """1F1B whose weight gradients wait: on stage s, for s more micro-batches.

  Input gradients reach the stages above earlier, and the weight gradients
  left over fill the end, where 1F1B is idle. Every stage then holds the
  activations of as many micro-batches, p, as the first stage does in 1F1B.

  Source: Qi et al., 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241,
  section 2.1 and the upper half of Figure 3.

  Args:
    stage: Which stage, from 0.
    num_stages: p.
    num_micro_batches: m.
  """
  ticks = []
  for tick in one_forward_one_backward(
    stage, num_stages, num_micro_batches, "input_gradient"
  ):
    ticks.append(tick)
    if tick.direction == "input_gradient" and tick.micro_batch >= stage:
      ticks.append(Tick("weight_gradient", tick.micro_batch - stage))
  left = range(max(0, num_micro_batches - stage), num_micro_batches)
  return (*ticks, *(Tick("weight_gradient", batch) for batch in left))


def _alternating(
  forwards: Sequence[Tick], backwards: Sequence[Tick], num_ahead: int
) -> Iterator[Tick]:
  """Yields forwards, a number of them ahead, in turn with backwards."""
  yield from forwards[:num_ahead]
  for place, backward in enumerate(backwards, start=num_ahead):
    yield from forwards[place : place + 1]
    yield backward
