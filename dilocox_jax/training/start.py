"""Finds the state with which a run begins at step 0.

Its parameters are new, or those of another run, or of a checkpoint that another
library has written. `resume` takes up a run that has begun.
"""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dilocox_jax.checks import (
  changed_fields,
  flat,
  json_file,
  of_type,
  require,
)
from dilocox_jax.config import RunConfig, free_on_resume
from dilocox_jax.config.run import from_saved
from dilocox_jax.config.sections import MeshConfig
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.metrics.work_directory import CONFIG, RECORD, RefusedError
from dilocox_jax.models import adapters, weights
from dilocox_jax.outer.average import AverageState
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.rounds.data_parallel import SharedState
from dilocox_jax.rounds.states import RoundState
from dilocox_jax.training import build, evaluation, states
from dilocox_jax.training.build import Programs
from dilocox_jax.training.checkpoint import FOLDER, Checkpoints
from dilocox_jax.training.parts import NO_PARTS, Parts
from dilocox_jax.training.states import TrainingState
from dilocox_jax.trees import Tree, kinds_by_path, shardings_of


def with_trainable(
  config: RunConfig,
  parts: Parts = NO_PARTS,
  trainable: Callable[[str], bool] | None = None,
) -> Parts:
  """Adds what is trained of a model, and reads or draws the rest.

  Args:
    config: Config of the run.
    parts: Parts that were handed in; if they say it, they are returned.
    trainable: As in `models.adapters.adapt`; None: what the config says.

  Raises:
    ValueError: If both say it, or the rest cannot be read.
  """
  require(
    trainable is None or not config.lora.rank,
    f"trainable and lora.rank={config.lora.rank} both say what is trained: "
    "drop one of them",
  )
  chosen = config.lora if config.lora.rank else trainable
  if chosen is None or parts.trainable:
    return parts
  source = pathlib.Path(config.checkpoint.init_from)
  if not config.checkpoint.init_from:
    model = parts.model or build.programs(_on_one_device(config)).model
    base = jax.jit(model.init)(jax.random.key(config.seed))
  elif _is_foreign(source):
    base = _params_of_other_library(config, source, parts)
  else:
    one_device = Replicas(config.num_local_replicas)
    base, _ = _saved_model(config, source, one_device, parts)
  adaptation = adapters.adapt(chosen, jax.tree.map(np.asarray, base))
  return dataclasses.replace(parts, trainable=adaptation)


def _on_one_device(config: RunConfig) -> RunConfig:
  """Returns a run's config for a machine that may lack the run's devices."""
  mesh = MeshConfig(num_replicas=config.mesh.num_replicas)
  return dataclasses.replace(config, mesh=mesh)


def first_state(
  config: RunConfig, programs: Programs, phase: str, parts: Parts = NO_PARTS
) -> TrainingState:
  """Returns the state before the first step.

  A run that starts from another one takes over the outer parameters and, if its
  shapes fit, the state of the outer optimizer.

  Args:
    config: Config of the run.
    programs: Programs of the run.
    phase: First phase of the run.
    parts: Parts that were handed in to the run. Those of the same names that
      were handed in to the other run must be among them.

  Raises:
    RefusedError: If the run should start from another run and cannot.
  """
  source = pathlib.Path(config.checkpoint.init_from)
  place = programs.rounds.replicas.place_state
  if not config.checkpoint.init_from or parts.trainable:  # Else: the frozen.
    params = states.first_params(programs, config.seed)
    return states.fresh(programs, phase, params)
  if _is_foreign(source):
    params = place(_params_of_other_library(config, source, parts), None)
    return states.fresh(programs, phase, params)
  replicas = programs.rounds.replicas
  params, optimizers = _saved_model(config, source, replicas, parts)
  _check_fits(programs, params, source)
  state = states.fresh(programs, phase, place(params, None))
  return _with_outer_optimizers(state, optimizers, source)


def _check_fits(programs: Programs, params: Tree, source: pathlib.Path) -> None:
  """Raises RefusedError unless parameters are those of the run's model."""
  wanted = kinds_by_path(jax.eval_shape(programs.model.init, jax.random.key(0)))
  found = kinds_by_path(params)
  for path in wanted | found:
    if wanted.get(path) != found.get(path):
      raise RefusedError(
        f"checkpoint.init_from={source} holds another model: its leaf {path!r} "
        f"is {found.get(path, 'missing')}, and that of this run's model is "
        f"{wanted.get(path, 'missing')}"
      )


def _params_of_other_library(
  config: RunConfig, source: pathlib.Path, parts: Parts
) -> Tree:
  """Reads `foreign_params` for a run, whose model must be the config's."""
  if parts.model is not None:
    raise RefusedError(
      f"checkpoint.init_from={source} is a checkpoint of another library, "
      "whose weights a model that is handed in cannot take: load them in the "
      "model, or drop the field"
    )
  return foreign_params(config.model.shape, source)


def _is_foreign(source: pathlib.Path) -> bool:
  try:
    return weights.is_checkpoint(source)
  except ValueError as error:
    reason = f"its config.json is damaged ({error})"
    raise RefusedError(f"checkpoint.init_from={source}: {reason}") from error


def _with_outer_optimizers(
  state: TrainingState, optimizers: Tree, source: object
) -> TrainingState:
  """Returns a state that goes on with another run's outer optimizer."""
  if not isinstance(state, RoundState):
    return state

  def shapes(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

  new = [fragment.optimizer for fragment in state.fragments]
  if shapes(new) == shapes(optimizers):
    optimizers = jax.device_put(optimizers, shardings_of(new))

    def taken_over(old: Any, optimizer: Any) -> Any:
      if isinstance(old.optimizer, AverageState):  # It begins with its run.
        optimizer = old.optimizer._replace(optimizer=optimizer.optimizer)
      return old._replace(optimizer=optimizer)

    fragments = tuple(map(taken_over, state.fragments, optimizers))
    return state._replace(fragments=fragments)
  logging.getLogger(__name__).warning(
    "the outer optimizer state of %s does not fit this run: it starts with a "
    "new one",
    source,
  )
  return state


def _source_config(source: pathlib.Path) -> RunConfig:
  """Reads the config of the run that a new run starts from.

  Args:
    source: Directory of the other run, as `checkpoint.init_from` names it.

  Raises:
    RefusedError: If the directory holds no run or no checkpoints.
  """
  path = source / CONFIG
  if not path.exists():
    raise RefusedError(f"checkpoint.init_from={source} is not a run directory")
  try:
    config = from_saved(json_file(path))
  except ValueError as error:
    raise RefusedError(f"{path} is not a run's config: {error}") from error
  if not (source / FOLDER).is_dir():
    raise RefusedError(f"{source} has no checkpoints, as the runs of a sweep")
  return config


def _parts_of(source: pathlib.Path, parts: Parts) -> Parts:
  """Returns those of a run's parts that another run had too.

  Raises:
    RefusedError: If the other run had a part that this one lacks.
  """
  names = ()
  with contextlib.suppress(ValueError):  # `_saved_outer` says more.
    saved = json_file(source / RECORD).get("handed_in", [])
    names = of_type("handed_in", saved, list)
  states_of = {"model", "inner_optimizer", "outer_optimizer", "exchange"}
  needed = states_of.intersection(names)
  if missing := sorted(needed - set(parts.names)):
    raise RefusedError(
      f"checkpoint.init_from={source} is a run to which {', '.join(missing)} "
      "was handed in: hand in the same to this one"
    )
  return Parts(**{name: getattr(parts, name) for name in needed})


def foreign_params(wanted: ModelShape, source: pathlib.Path) -> Tree:
  """Reads the parameters of a checkpoint that another library has written.

  Args:
    wanted: Sizes of the run's model.
    source: Folder of the checkpoint.

  Raises:
    RefusedError: If it cannot be read, or holds another model.
  """
  try:
    shape, params = weights.read_checkpoint(source)
  except ValueError as error:
    raise RefusedError(f"checkpoint.init_from={source}: {error}") from error
  ours = vars(wanted)
  if others := {k: v for k, v in vars(shape).items() if v != ours[k]}:
    raise RefusedError(
      f"checkpoint.init_from={source} holds another model: set "
      + " ".join(f"--config.model.{name}={v}" for name, v in others.items())
    )
  return params


def saved_outer_params(workdir: pathlib.Path, parts: Parts = NO_PARTS) -> Tree:
  """Reads the outer parameters of a run's newest checkpoint onto one device.

  Args:
    workdir: Directory of the run.
    parts: Parts that were handed in to the run.

  Raises:
    RefusedError: If the directory holds no run or no whole checkpoint.
  """
  config = _source_config(workdir)
  one_device = Replicas(config.num_local_replicas)
  return _saved_outer(config, workdir, one_device, parts)[0]


def _saved_model(
  config: RunConfig, source: pathlib.Path, replicas: Replicas, parts: Parts
) -> tuple[Tree, Tree]:
  """Reads the whole model of the run that a new run starts from.

  Args:
    config: Config of the new run.
    source: Directory of the other run.
    replicas: As in `_saved_outer`.
    parts: Parts that were handed in to the new run.

  Returns:
    As `_saved_outer`, with adapters added to the kernels.

  Raises:
    RefusedError: If it cannot be read, or is another model.
  """
  old_config = _source_config(source)
  parts = with_trainable(old_config, _parts_of(source, parts))
  if not parts.model and old_config.model.shape != config.model.shape:
    raise RefusedError(
      f"checkpoint.init_from={source} holds a model of another shape "
      f"({old_config.model.shape}): set the same config.model"
    )
  params, optimizers = _saved_outer(old_config, source, replicas, parts)
  if part := parts.trainable:
    return part.fold(params, part.frozen), None
  return params, optimizers


def _check_same_config(
  config: RunConfig, record: dict[str, Any], source: pathlib.Path
) -> None:
  """Refuses a checkpoint that lies beside the config of another run.

  Args:
    config: What the directory's config.json says.
    record: Record of a checkpoint in it.
    source: The directory.

  Raises:
    RefusedError: If the two are of different runs.
  """
  saved = flat(record["config"])
  changes = changed_fields(saved, config.to_mapping(), free_on_resume())
  if changes:
    raise RefusedError(
      f"{source / CONFIG} is not the config of the checkpoints beside it "
      f"(theirs -> its: {'; '.join(changes)}): put the right one back"
    )


def _saved_outer(
  config: RunConfig,
  source: pathlib.Path,
  replicas: Replicas,
  parts: Parts = NO_PARTS,
) -> tuple[Tree, Tree]:
  """Reads another run's newest whole checkpoint, without changing its files.

  Args:
    config: Config of the other run.
    source: Its directory.
    replicas: Whose devices the arrays are read onto. The other run may have
      used other devices, so only its number of replicas matters here.
    parts: Parts that were handed in to the other run.

  Returns:
    Outer parameters, and the outer optimizer states of all fragments if
    replicas share them.
  """
  programs = build.programs(_on_one_device(config), parts)

  def like(record: dict) -> Tree:
    _check_same_config(config, record, source)
    state = states.abstract(programs, record["phase"], record["in_flight"])
    return replicas.abstract(state, None)

  with contextlib.closing(Checkpoints(source / FOLDER, read_only=True)) as kept:
    restored = kept.restore(like)
  if restored is None:
    raise RefusedError(f"checkpoint.init_from={source} has no whole checkpoint")
  state, _ = restored
  params = evaluation.params_to_keep(programs, state)
  if isinstance(state, SharedState) or not programs.rounds.outer.rule.is_shared:
    return params, None
  return params, [fragment.optimizer for fragment in state.fragments]
