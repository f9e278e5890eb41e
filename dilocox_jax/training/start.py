"""Builds the first state of a run, and reads saved parameters.

The first parameters are drawn at random, or read from another run or from a
checkpoint that another library has written. The module `resume` continues a run
that has already started.
"""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Callable, Iterator
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
from dilocox_jax.models.weights import StoredCheckpoint
from dilocox_jax.outer.average import AverageState
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.rounds.data_parallel import SharedState
from dilocox_jax.rounds.states import RoundState
from dilocox_jax.training import build, evaluation, saved_params, states
from dilocox_jax.training.build import Programs
from dilocox_jax.training.checkpoint import FOLDER, Checkpoints
from dilocox_jax.training.overrides import NO_OVERRIDES, Overrides
from dilocox_jax.training.states import TrainingState
from dilocox_jax.trees import Tree, kinds_by_path, shardings_of


def with_trainable(
  config: RunConfig,
  overrides: Overrides = NO_OVERRIDES,
  trainable: Callable[[str], bool] | None = None,
) -> Overrides:
  """Adds the trained part to the overrides, unless the whole model is trained.

  The model is read from `checkpoint.init_from`, or drawn at random if that
  field is empty. Its leaves that are not trained (with adapters: all leaves)
  become a part of the result.

  Args:
    config: Config of the run.
    overrides: The caller's objects in place of those that the config names. If
      a trained part is already among them, they are returned unchanged.
    trainable: Function from the path of a leaf to whether the leaf is trained;
      None means the adapters of the config, or the whole model if the config
      has none.

  Returns:
    The overrides with the trained part. If the whole model is trained, the
    overrides are unchanged.

  Raises:
    ValueError: If both `trainable` and the config name a trained part, if no
      leaf is trained, if the model lacks one of `lora.products`, or if the
      model cannot be read.
    TypeError: If `trainable` cannot be called.
  """
  require(
    trainable is None or not config.lora.rank,
    f"trainable and lora.rank={config.lora.rank} both say what is trained: "
    "drop one of them",
  )
  trained_part = config.lora if config.lora.rank else trainable
  if trained_part is None or overrides.trainable:
    return overrides
  source = pathlib.Path(config.checkpoint.init_from)
  if not config.checkpoint.init_from:
    model = overrides.model or build.programs(_on_one_device(config)).model
    drawn_params = jax.jit(model.init)(jax.random.key(config.seed))
    base_params = jax.tree.map(np.asarray, drawn_params)
  elif _is_of_other_library(source):
    checkpoint = _checkpoint_of_other_library(config, source, overrides)
    # The devices read their parts when the programs are built.
    base_params = checkpoint.params()
  else:
    one_device = Replicas(config.num_local_replicas)
    saved_params, _ = _saved_model(config, source, one_device, overrides)
    base_params = jax.tree.map(np.asarray, saved_params)
  adaptation = adapters.adapt(trained_part, base_params)
  return dataclasses.replace(overrides, trainable=adaptation)


def _on_one_device(config: RunConfig) -> RunConfig:
  """Returns the config of a run with all replicas on one device."""
  mesh = MeshConfig(num_replicas=config.mesh.num_replicas)
  return dataclasses.replace(config, mesh=mesh)


def first_state(
  config: RunConfig,
  programs: Programs,
  phase: str,
  overrides: Overrides = NO_OVERRIDES,
) -> TrainingState:
  """Returns the state before the first step.

  The field `checkpoint.init_from` says where the parameters come from:

  - Empty: they are drawn at random, with `config.seed`.
  - Directory of another run: its outer parameters, or their average if it keeps
    one. If the first phase is "rounds" and the shapes fit, the state of its
    outer optimizer is taken over, too.
  - Checkpoint of another library: its parameters.

  If only a part of the model is trained, this function does not read
  `checkpoint.init_from`. `with_trainable` has read the frozen part from there,
  and the trained part starts as `Adaptation.init` says.

  Args:
    config: Config of the run.
    programs: Programs of the run.
    phase: First phase of the run: "rounds", or "data_parallel" if the run
      begins with steps that average gradients.
    overrides: The caller's objects in place of those that the config names. A
      model, an optimizer or an exchange that the caller passed to the other run
      must be among them.

  Raises:
    RefusedError: If the run cannot start from `checkpoint.init_from`.
  """
  source = pathlib.Path(config.checkpoint.init_from)
  replicas = programs.rounds.replicas
  # If only a part is trained, `init_from` names the frozen part, which
  # `with_trainable` has read.
  if not config.checkpoint.init_from or overrides.trainable:
    params = states.first_params(programs, config.seed)
    return states.fresh(programs, phase, params)
  if _is_of_other_library(source):
    checkpoint = _checkpoint_of_other_library(config, source, overrides)
    with _refusing(source):
      params = replicas.place_state(checkpoint.params(), None)
    return states.fresh(programs, phase, params)
  params, optimizers = _saved_model(config, source, replicas, overrides)
  _check_fits(programs, params, source)
  state = states.fresh(programs, phase, replicas.place_state(params, None))
  return _with_outer_optimizers(state, optimizers, source)


def _check_fits(programs: Programs, params: Tree, source: pathlib.Path) -> None:
  """Raises RefusedError unless parameters of another run fit the run's model.

  They must have the paths, shapes and types of the model's parameters.
  """
  model_params = jax.eval_shape(programs.model.init, jax.random.key(0))
  model_kinds = kinds_by_path(model_params)
  saved_kinds = kinds_by_path(params)
  for path in model_kinds | saved_kinds:
    if model_kinds.get(path) != saved_kinds.get(path):
      raise RefusedError(
        f"checkpoint.init_from={source} holds another model: its leaf {path!r} "
        f"is {saved_kinds.get(path, 'missing')}, and that of this run's model "
        f"is {model_kinds.get(path, 'missing')}"
      )


def _checkpoint_of_other_library(
  config: RunConfig, source: pathlib.Path, overrides: Overrides
) -> StoredCheckpoint:
  """Opens a checkpoint of another library, and checks that it fits the run.

  Raises RefusedError if it does not fit, or if the overrides have a model.
  """
  if overrides.model is not None:
    raise RefusedError(
      f"checkpoint.init_from={source} is a checkpoint of another library, "
      "whose weights a model that is passed in cannot take: load them in the "
      "model, or drop the field"
    )
  return foreign_checkpoint(config.model.shape, source)


@contextlib.contextmanager
def _refusing(source: pathlib.Path) -> Iterator[None]:
  """Turns a ValueError in a `with` block into a RefusedError for a source."""
  try:
    yield
  except ValueError as error:
    raise RefusedError(f"checkpoint.init_from={source}: {error}") from error


def _is_of_other_library(source: pathlib.Path) -> bool:
  """Whether a folder is a checkpoint that another library has written.

  Raises RefusedError if the folder has a config.json that cannot be read.
  """
  try:
    return weights.is_checkpoint(source)
  except ValueError as error:
    reason = f"its config.json is damaged ({error})"
    raise RefusedError(f"checkpoint.init_from={source}: {reason}") from error


def _with_outer_optimizers(
  state: TrainingState, optimizers: Tree, source: object
) -> TrainingState:
  """Returns a state with the outer optimizer states of another run.

  An average of the outer parameters starts anew. A `SharedState`, which has no
  outer optimizer, is returned unchanged. If `optimizers` is None, or its shapes
  do not fit, the state is returned unchanged, and a warning is logged.
  """
  if not isinstance(state, RoundState):
    return state

  def shapes(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

  new_optimizers = [fragment.optimizer for fragment in state.fragments]
  if shapes(new_optimizers) != shapes(optimizers):
    logging.getLogger(__name__).warning(
      "the outer optimizer state of %s does not fit this run: it starts with a "
      "new one",
      source,
    )
    return state
  optimizers = jax.device_put(optimizers, shardings_of(new_optimizers))
  fragments = []
  for fragment, optimizer in zip(state.fragments, optimizers, strict=True):
    if isinstance(fragment.optimizer, AverageState):
      # Every run averages its own steps only, so its average starts anew.
      optimizer = fragment.optimizer._replace(optimizer=optimizer.optimizer)
    fragments.append(fragment._replace(optimizer=optimizer))
  return state._replace(fragments=tuple(fragments))


def _source_config(source: pathlib.Path) -> RunConfig:
  """Reads the config of the run that a new run starts from.

  Raises RefusedError if the directory holds no run, a config that cannot be
  read, or no checkpoints.
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


def _common_overrides(source: pathlib.Path, overrides: Overrides) -> Overrides:
  """Picks the overrides (model, optimizers, exchange) that the source also had.

  The source is the directory of another run. Raises RefusedError if the source
  had one of these and the new run lacks it.
  """
  saved_names = []
  # If the record cannot be read, `_saved_outer` raises a clearer error.
  with contextlib.suppress(ValueError):
    saved_overrides = json_file(source / RECORD).get("overrides", [])
    saved_names = of_type("overrides", saved_overrides, list)
  parts_with_state = {"model", "inner_optimizer", "outer_optimizer", "exchange"}
  needed = parts_with_state.intersection(saved_names)
  missing = sorted(needed - set(overrides.names))
  if missing:
    raise RefusedError(
      f"checkpoint.init_from={source} is a run to which {', '.join(missing)} "
      "was passed in: pass the same to this one"
    )
  return Overrides(**{name: getattr(overrides, name) for name in needed})


def foreign_checkpoint(
  expected_shape: ModelShape, source: pathlib.Path
) -> StoredCheckpoint:
  """Opens a checkpoint that another library has written.

  Raises:
    RefusedError: If the checkpoint cannot be read, or if its model has another
      shape than `expected_shape`.
  """
  with _refusing(source):
    checkpoint = weights.open_checkpoint(source)
  flags = [
    f"--config.model.{name}={value}"
    for name, value in vars(checkpoint.shape).items()
    if value != getattr(expected_shape, name)
  ]
  if flags:
    raise RefusedError(
      f"checkpoint.init_from={source} holds another model: set "
      + " ".join(flags)
    )
  return checkpoint


def saved_outer_params(
  workdir: pathlib.Path, overrides: Overrides = NO_OVERRIDES
) -> Tree:
  """Reads the outer parameters of a run's newest checkpoint onto one device.

  If the run keeps an average of the outer parameters, the average is read. If
  each replica has outer parameters of its own, their mean is read. If the run
  trained only a part of the model, only this part is read.

  Args:
    workdir: Directory of the run.
    overrides: Overrides that the caller passed to the run, with the trained
      part if there is one (`with_trainable`).

  Raises:
    RefusedError: If the directory holds no run or no undamaged checkpoint, or
      if the checkpoint does not fit its config or the overrides.
  """
  config = _source_config(workdir)
  one_device = Replicas(config.num_local_replicas)
  params, _ = _saved_outer(config, workdir, one_device, overrides)
  return params


def saved_leaves(
  workdir: pathlib.Path, overrides: Overrides = NO_OVERRIDES
) -> dict[str, Any]:
  """Opens the outer parameters of a run's newest checkpoint.

  If the run keeps an average of the outer parameters, the average is opened.

  Args:
    workdir: Directory of a run that trained a whole model of this package.
    overrides: Overrides that the caller passed to the run.

  Returns:
    A nested dict of leaves. `np.asarray` reads a leaf from the disk.

  Raises:
    RefusedError: If the directory holds no run or no undamaged checkpoint, or
      if its config belongs to another run than the checkpoint.
  """
  config = _source_config(workdir)
  programs = build.programs(_on_one_device(config), overrides)
  like = _template_of(config, workdir, programs)
  checkpoints = Checkpoints(workdir / FOLDER, read_only=True)
  with contextlib.closing(checkpoints):
    opened = checkpoints.open_newest(like)
  if opened is None:
    raise RefusedError(f"{workdir} has no whole checkpoint")
  state, _ = opened
  return saved_params.saved_leaves(programs, state)


def _template_of(
  config: RunConfig, source: pathlib.Path, programs: Programs
) -> Callable[[dict[str, Any]], TrainingState]:
  """Returns a function from a checkpoint's record to the shapes of its state.

  A record is the JSON values that were saved with a state. The function raises
  RefusedError if the config in the record is not `config`.
  """

  def like(record: dict[str, Any]) -> TrainingState:
    _check_same_config(config, record, source)
    return states.abstract(programs, record["phase"], record["in_flight"])

  return like


def _saved_model(
  config: RunConfig,
  source: pathlib.Path,
  replicas: Replicas,
  overrides: Overrides,
) -> tuple[Tree, Tree]:
  """Reads the whole model of the run that a new run starts from.

  Returns the parameters, with adapters added to the kernels, and the outer
  optimizer states that `_saved_outer` returns. If the run trained only a part
  of the model, None takes the place of these states.
  """
  source_config = _source_config(source)
  overrides = with_trainable(
    source_config, _common_overrides(source, overrides)
  )
  if not overrides.model and source_config.model.shape != config.model.shape:
    raise RefusedError(
      f"checkpoint.init_from={source} holds a model of another shape "
      f"({source_config.model.shape}): set the same config.model"
    )
  params, optimizers = _saved_outer(source_config, source, replicas, overrides)
  trainable = overrides.trainable
  if trainable:
    return trainable.fold(params, trainable.frozen), None
  return params, optimizers


def _check_same_config(
  config: RunConfig, record: dict[str, Any], source: pathlib.Path
) -> None:
  """Raises RefusedError if config and checkpoint are of different runs."""
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
  overrides: Overrides = NO_OVERRIDES,
) -> tuple[Tree, Tree]:
  """Reads another run's newest undamaged checkpoint; changes none of its files.

  Returns the outer parameters, or their average if the run keeps one, and a
  list of the outer optimizer states of all fragments (parts of the parameters).
  None takes the place of the list in two cases: the state is a `SharedState`,
  or each replica has outer parameters of its own.
  """
  programs = build.programs(_on_one_device(config), overrides)
  template = _template_of(config, source, programs)

  def like(record: dict[str, Any]) -> Tree:
    return replicas.abstract(template(record), None)

  checkpoints = Checkpoints(source / FOLDER, read_only=True)
  with contextlib.closing(checkpoints):
    restored = checkpoints.restore(like)
  if restored is None:
    raise RefusedError(f"{source} has no whole checkpoint")
  state, _ = restored
  params = evaluation.params_to_keep(programs, state)
  if isinstance(state, SharedState) or not programs.rounds.outer.is_shared:
    return params, None
  return params, [fragment.optimizer for fragment in state.fragments]
