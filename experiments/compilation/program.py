"""Lowers the program that the trainer runs most often, without any values."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.outer.round_program import RoundState
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.training import build, states


@dataclasses.dataclass(frozen=True)
class Program:
  """A segment of a run, ready to be compiled.

  Attributes:
    config: Config of the run.
    segment: The segment.
    planned_bytes: Bytes that one replica sends in it, by the plan.
    lowered: Its program.
  """

  config: RunConfig
  segment: Segment
  planned_bytes: int
  lowered: jax.stages.Lowered


def steady_program(
  config: RunConfig, devices: Sequence[Any] | None = None
) -> Program:
  """Lowers a segment in which everything that can arrive does.

  Args:
    config: Config of a run, with a mesh of devices.
    devices: Devices to compile for; None: those of this machine.

  Raises:
    ValueError: If the run is too short to have such a segment.
  """
  programs = build.programs(config, devices=devices)
  segment = _steady_segment(config)
  state = states.abstract(programs, segment.phase)
  sizes = config.data.batch_size, config.data.sequence_length + 1
  shape = config.mesh.num_replicas, segment.num_steps, *sizes
  batches = jax.ShapeDtypeStruct(shape, np.int32)
  if isinstance(state, RoundState):
    lowered = programs.rounds.lowered(state, batches, segment.windows)
  else:
    place = programs.steps.replicas.batch_sharding
    batches = batches.update(sharding=place)
    lowered = programs.steps.compiled.lower(state, batches)
  sent = to_plan.traffic(config).segment_bytes(segment)
  return Program(config, segment, sent, lowered)


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
