"""Where a run starts: at the beginning, from another run, or where it was.

A run directory with a whole checkpoint is continued, and only by a config
that means the same run on the same text; anything else is refused before an
array is read.
"""

import dataclasses
import json
import logging
import pathlib
from typing import Any

import jax

from dilocox_jax.config import FREE_ON_RESUME, RunConfig, from_mapping
from dilocox_jax.config.sections import MeshConfig
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.mapping import changed_fields
from dilocox_jax.outer.data_parallel import SharedState
from dilocox_jax.outer.round_program import RoundState
from dilocox_jax.pytypes import Tree
from dilocox_jax.training import build, states
from dilocox_jax.training.build import Programs
from dilocox_jax.training.checkpoint import Checkpoints, RefusedError
from dilocox_jax.training.states import TrainingProgress, TrainingState


def first_state(
  config: RunConfig, programs: Programs, phase: str
) -> TrainingState:
  """The state before the first step.

  Args:
    config: The run.
    programs: Its programs.
    phase: Its first phase.

  Raises:
    RefusedError: If it should start from another run and cannot.
  """
  source = config.checkpoint.init_from
  if source:
    return state_from_run(config, programs, phase, pathlib.Path(source))
  params = states.first_params(programs, phase, config.seed)
  return states.fresh(programs, phase, params)


def resumed_state(
  config: RunConfig,
  programs: Programs,
  checkpoints: Checkpoints,
  corpus_digest: str,
) -> tuple[TrainingState, dict[str, Any]] | None:
  """The newest whole state of this very run, and its record.

  Args:
    config: The run as it is asked for now.
    programs: Its programs.
    checkpoints: What is there.
    corpus_digest: Of the text as it is now.

  Raises:
    RefusedError: If the checkpoints are of a run that means something else.
  """

  def template(record: dict[str, Any]) -> TrainingState:
    _check_same_run(config, corpus_digest, record)
    return states.abstract(programs, record["phase"])

  restored = checkpoints.restore(template)
  if restored:
    progress = TrainingProgress(**restored[1]["position"])
    logging.getLogger(__name__).info(
      "continuing at step %d of %d", progress.step, config.total_steps
    )
  return restored


def _check_same_run(
  config: RunConfig, corpus_digest: str, record: dict[str, Any]
) -> None:
  changed = changed_fields(
    record["config"], config.to_mapping(), FREE_ON_RESUME
  )
  if record["corpus_digest"] != corpus_digest:
    changed.append(f"corpus: {record['corpus_digest']} -> {corpus_digest}")
  if changed:
    raise RefusedError(
      "the work directory holds a run with other settings "
      f"({'; '.join(changed)}): take another --workdir, or set them back"
    )


def state_from_run(
  config: RunConfig,
  programs: build.Programs,
  phase: str,
  source: pathlib.Path,
) -> TrainingState:
  """The first state of a run that goes on from another run's outer state.

  Args:
    config: The new run.
    programs: The new run's programs.
    phase: The new run's first phase.
    source: Directory of the other run.

  Raises:
    RefusedError: If there is no such run, or its model has another shape.
  """
  old_config = _config_of(source)
  if old_config.model.shape != config.model.shape:
    raise RefusedError(
      f"checkpoint.init_from={source} holds a model of another shape "
      f"({old_config.model.shape}): set the same model"
    )
  # What is read lies on this run's devices; how the other's lay is forgotten.
  mesh = MeshConfig(num_replicas=old_config.mesh.num_replicas)
  old = build.programs(dataclasses.replace(old_config, mesh=mesh))
  replicas = programs.replicas_of(phase)
  params, outer_optimizer = _outer_of(old, _state_of(old, source, replicas))
  params = replicas.place_state(params, None)
  state = states.fresh(programs, phase, params)
  if not isinstance(state, RoundState):
    return state
  kept = state.outer.optimizer
  if not _alike(kept, outer_optimizer):
    logging.getLogger(__name__).warning(
      "the outer optimizer of %s does not fit this run's: it starts fresh",
      source,
    )
    return state
  return programs.rounds.with_outer_optimizer(state, outer_optimizer)


def _config_of(source: pathlib.Path) -> RunConfig:
  path = source / "config.json"
  if not path.exists():
    raise RefusedError(f"checkpoint.init_from={source} is not a run directory")
  try:
    return from_mapping(json.loads(path.read_text()))
  except ValueError as error:
    raise RefusedError(f"{path} is not a run's config: {error}") from error


def _state_of(
  programs: build.Programs, source: pathlib.Path, devices: Replicas
) -> TrainingState:
  if not (source / "checkpoints").is_dir():
    raise RefusedError(f"checkpoint.init_from={source} has no checkpoints")
  checkpoints = Checkpoints(source / "checkpoints", read_only=True)
  try:
    restored = checkpoints.restore(
      lambda record: devices.abstract(
        states.abstract(programs, record["phase"]), None
      )
    )
  finally:
    checkpoints.close()
  if restored is None:
    raise RefusedError(f"checkpoint.init_from={source} has no whole checkpoint")
  return restored[0]


def _outer_of(
  programs: build.Programs, state: TrainingState
) -> tuple[Tree, Tree]:
  """Outer parameters, and outer optimizer state where replicas share one."""
  if isinstance(state, SharedState):
    return state.params, None
  rounds = programs.rounds
  is_per_replica = rounds.outer.rule.is_per_replica
  return rounds.outer_params(state), (
    None if is_per_replica else state.outer.optimizer
  )


def _alike(one: Tree, other: Tree) -> bool:
  if jax.tree.structure(one) != jax.tree.structure(other):
    return False
  pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  return all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
