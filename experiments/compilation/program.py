"""Lowers the program that the trainer runs most often, without any values."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.distributed import host_memory
from dilocox_jax.outer.round_states import RoundState
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.plan.schedule.sync_schedule import Window
from dilocox_jax.training import build, states


@dataclasses.dataclass(frozen=True)
class Program:
  """A window of a run, or a segment of averaged gradients, to be compiled.

  Attributes:
    config: Config of the run.
    num_steps: Inner steps of it.
    planned_bytes: Bytes that one replica sends in it, by the plan.
    kept_bytes: Bytes of the training state that a device keeps beside it: of
      the fragments that no event of the window is about.
    lowered: Its program.
  """

  config: RunConfig
  num_steps: int
  planned_bytes: int
  kept_bytes: int
  lowered: jax.stages.Lowered


def steady_program(
  config: RunConfig, devices: Sequence[Any] | None = None
) -> Program:
  """Lowers a window in which an exchange ends, late enough in a run.

  Of the windows of a round it is the one that sends most.

  Args:
    config: Config of a run, with a mesh of devices.
    devices: Devices to compile for; None: those of this machine.

  Raises:
    ValueError: If the run is too short to have such a window.
  """
  programs = build.programs(config, devices=devices)
  segment, traffic = _steady_segment(config), to_plan.traffic(config)
  sizes = config.data.batch_size, config.data.sequence_length + 1
  shape = config.mesh.num_replicas, segment.num_steps, *sizes
  batches = jax.ShapeDtypeStruct(shape, np.int32)
  if segment.windows:
    step, window = _fullest(segment, traffic)
    counts = config.sync.named.schedule.num_in_flight(step)
    state = states.abstract(programs, segment.phase, in_flight=counts)
    assert isinstance(state, RoundState)
    lowered = programs.rounds.lowered(state, batches, window)
    kept = _kept_bytes(state, window)
    segment = dataclasses.replace(
      segment, num_steps=window.num_steps, windows=(window,)
    )
  else:
    state, kept = states.abstract(programs, segment.phase), 0
    place = programs.steps.replicas.batch_sharding
    batches = batches.update(sharding=place)
    lowered = programs.steps.compiled.lower(state, batches)
  sent = traffic.segment_bytes(segment)
  return Program(config, segment.num_steps, sent, kept, lowered)


def _fullest(segment: Segment, traffic: Traffic) -> tuple[int, Window]:
  """Returns the window that sends most, and the schedule's step before it."""
  done = segment.start - segment.schedule_start
  counts = itertools.accumulate(
    (window.num_steps for window in segment.windows), initial=done
  )
  found = zip(counts, segment.windows, strict=False)
  arriving = [(step, window) for step, window in found if window.applied]

  def size(each: tuple[int, Window]) -> tuple[int, bool]:
    window = each[1]
    assert window.applied
    return traffic.exchange_bytes(window.applied.fragment), bool(window.sent)

  return max(arriving, key=size)


def _kept_bytes(state: RoundState, window: Window) -> int:
  """Returns the bytes on a device of fragments that a window leaves alone."""
  events = window.applied, window.sent
  own = {event.fragment for event in events if event}
  others = [f for p, f in enumerate(state.fragments) if p not in own]
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(others)
    if leaf.sharding.memory_kind != host_memory.HOST
  )


def _steady_segment(config: RunConfig) -> Segment:
  plan = to_plan.run_plan(config)
  schedule = config.sync.named.schedule
  start = plan.local_start
  if plan.method.exchanged == "gradient":
    return plan.segment(0)
  step = start + (schedule.depth + 1) * schedule.sync_interval
  if step + schedule.sync_interval > plan.total_steps:
    raise ValueError(
      f"total_steps={plan.total_steps} ends before everything that is sent in "
      f"one round arrives in another: take at least "
      f"{step + schedule.sync_interval}"
    )
  return plan.segment(step)
