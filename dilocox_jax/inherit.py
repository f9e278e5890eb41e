"""A new run from another's outer parameters and outer state.

This is the only way in which the number of replicas changes: the new replicas
all start where the old outer parameters stood, with nothing in flight, no
residuals and fresh inner optimizers.
"""

import dataclasses
import json
import logging
import pathlib

import jax

from dilocox_jax import assembly, states
from dilocox_jax.checkpoint import Checkpoints, RefusedError
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.devices import Devices
from dilocox_jax.outer.data_parallel import SharedState
from dilocox_jax.outer.round import RoundState
from dilocox_jax.pytypes import Tree
from dilocox_jax.sections import MeshConfig
from dilocox_jax.states import State


def inherited_state(
  config: RunConfig,
  programs: assembly.Programs,
  phase: str,
  source: pathlib.Path,
) -> State:
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
  old = assembly.programs(dataclasses.replace(old_config, mesh=mesh))
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
  programs: assembly.Programs, source: pathlib.Path, devices: Devices
) -> State:
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


def _outer_of(programs: assembly.Programs, state: State) -> tuple[Tree, Tree]:
  """Outer parameters, and outer optimizer state where replicas share one."""
  if isinstance(state, SharedState):
    return state.params, None
  rounds = programs.rounds
  is_personal = rounds.outer.rule.is_personal
  return rounds.outer_params(state), (
    None if is_personal else state.outer.optimizer
  )


def _alike(one: Tree, other: Tree) -> bool:
  if jax.tree.structure(one) != jax.tree.structure(other):
    return False
  pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
  return all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
