"""Finds the state from which a run starts.

There are three cases: step 0 with new parameters, step 0 with the parameters of
another run, or the newest checkpoint of the same run. A run directory with a
whole checkpoint is continued if the config means the same run on the same text,
and is refused otherwise. If the directory holds a run without a checkpoint, the
run is not overwritten (see `check_nothing_is_lost`).
"""

import contextlib
import dataclasses
import logging
import pathlib

import jax

from dilocox_jax.checks import json_object
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.config.sections import MeshConfig
from dilocox_jax.distributed import processes
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.metrics import RecordError, read_rows
from dilocox_jax.metrics.recorder import METRICS, TIMING
from dilocox_jax.metrics.run_record import CONFIG, RECORD
from dilocox_jax.models import weights
from dilocox_jax.outer.data_parallel import SharedState
from dilocox_jax.outer.round_states import RoundState
from dilocox_jax.report.page import PAGE
from dilocox_jax.training import build, evaluation, states
from dilocox_jax.training.build import Programs
from dilocox_jax.training.checkpoint import (
  FOLDER,
  Checkpoints,
  RefusedError,
  saved_steps,
)
from dilocox_jax.training.parts import NO_PARTS, Parts
from dilocox_jax.training.resume import changed_settings
from dilocox_jax.training.states import TrainingState
from dilocox_jax.trees import Tree


def check_nothing_is_lost(
  config: RunConfig, workdir: pathlib.Path, corpus_digest: str
) -> None:
  """Refuses a directory if starting at step 0 would delete results of a run.

  A run that was killed before its first save may start again, because it will
  compute the same rows again, equal in every bit. So a directory that holds a
  run but no checkpoint is accepted only if all of this is true:

  - Config and text are those of the same run.
  - The folder of checkpoints exists. A run creates it before its first row, so
    if it is missing, someone removed it.
  - No checkpoint was ever complete. `timing.jsonl` has a row for every save
    that began, and a save begins only when the one before it is complete. So
    two rows, or a report, mean that a checkpoint was complete once.

  All processes must call this function, before `Checkpoints` creates a folder.

  Args:
    config: Config of the run.
    workdir: The run directory.
    corpus_digest: Digest of the text.

  Raises:
    RefusedError: If results would be lost. All processes raise it.
  """
  reason = ""
  if processes.is_main() and not saved_steps(workdir / FOLDER):
    reason = _lost_run(config, workdir, corpus_digest)
  if reason := processes.from_main(reason, str):
    raise RefusedError(reason)


def _lost_run(
  config: RunConfig, workdir: pathlib.Path, corpus_digest: str
) -> str:
  """Returns which results would be lost and what to do; "" if none would be.

  Args:
    config: Config of the run.
    workdir: A directory without checkpoints.
    corpus_digest: Digest of the text.
  """
  files = [n for n in (CONFIG, RECORD, METRICS) if (workdir / n).exists()]
  if not files:
    return ""
  try:
    saves = [
      row for row in read_rows(workdir / TIMING) if row["event"] == "checkpoint"
    ]
    was_saved = not (workdir / FOLDER).is_dir() or len(saves) > 1
    if was_saved or (workdir / PAGE).exists():
      reason = "its checkpoints are gone"
    else:
      reason = _other_run(config, workdir, corpus_digest)
  except (RecordError, KeyError):
    reason = f"its {TIMING} cannot be read"
  if not reason:
    logging.getLogger(__name__).info(
      "no checkpoint was saved before: starting again at step 0"
    )
    return ""
  return (
    f"the work directory {workdir} holds a run ({', '.join(files)}) that a new "
    f"one would overwrite, and {reason}: take another --workdir, or move this "
    "one away"
  )


def _other_run(
  config: RunConfig, workdir: pathlib.Path, corpus_digest: str
) -> str:
  """Returns how the run in a directory differs from the config; may be ""."""
  try:
    record = json_object((workdir / RECORD).read_bytes(), RECORD)
    digest = record["corpus_digest"]
  except (OSError, ValueError, KeyError):
    digest = corpus_digest  # The run was killed before it wrote this file.
  try:
    saved = json_object((workdir / CONFIG).read_bytes(), CONFIG)
    changes = changed_settings(saved, digest, config, corpus_digest)
  except (OSError, ValueError, TypeError, AttributeError):
    return f"its {CONFIG} cannot be read"
  return f"it has other settings ({'; '.join(changes)})" if changes else ""


def first_state(
  config: RunConfig, programs: Programs, phase: str, parts: Parts = NO_PARTS
) -> TrainingState:
  """Returns the state before the first step.

  Args:
    config: Config of the run.
    programs: Programs of the run.
    phase: First phase of the run.
    parts: Parts that were handed in to the run.

  Raises:
    RefusedError: If the run should start from another run and cannot.
  """
  source = config.checkpoint.init_from
  if source and not parts.trainable:  # Else it is what is frozen.
    return state_from_run(config, programs, phase, pathlib.Path(source), parts)
  params = states.first_params(programs, config.seed)
  return states.fresh(programs, phase, params)


def check_source(source: pathlib.Path) -> RunConfig:
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
    config = from_mapping(json_object(path.read_bytes(), "it"))
  except ValueError as error:
    raise RefusedError(f"{path} is not a run's config: {error}") from error
  if not (source / FOLDER).is_dir():
    raise RefusedError(f"checkpoint.init_from={source} has no checkpoints")
  return config


def state_from_run(
  config: RunConfig,
  programs: build.Programs,
  phase: str,
  source: pathlib.Path,
  parts: Parts = NO_PARTS,
) -> TrainingState:
  """Returns the first state of a run that starts from another run.

  The new run takes over the outer parameters and, if its shapes fit, the state
  of the outer optimizer. A checkpoint of another library has parameters alone.

  Args:
    config: Config of the new run.
    programs: Programs of the new run.
    phase: First phase of the new run.
    source: Directory of the other run, or of the checkpoint.
    parts: Parts that were handed in to the new run. Those of the same names
      that were handed in to the other run must be among them.

  Raises:
    RefusedError: If there is no such run, or its model has another shape.
  """
  try:
    is_foreign = weights.is_checkpoint(source)
  except ValueError as error:
    reason = f"its config.json is damaged ({error})"
    raise RefusedError(f"checkpoint.init_from={source}: {reason}") from error
  if is_foreign:
    params = programs.rounds.replicas.place_state(
      foreign_params(config, source), None
    )
    return states.fresh(programs, phase, params)
  old_config = check_source(source)
  parts = _parts_of(source, parts)
  if not parts.model and old_config.model.shape != config.model.shape:
    raise RefusedError(
      f"checkpoint.init_from={source} holds a model of another shape "
      f"({old_config.model.shape}): set the same config.model"
    )
  replicas = programs.rounds.replicas
  params, outer_optimizers = _saved_outer(old_config, source, replicas, parts)
  params = replicas.place_state(params, None)
  state = states.fresh(programs, phase, params)
  if not isinstance(state, RoundState):
    return state
  new = [fragment.optimizer for fragment in state.fragments]
  if not _have_same_shapes(new, outer_optimizers):
    logging.getLogger(__name__).warning(
      "the outer optimizer state of %s does not fit this run: it starts with a "
      "new one",
      source,
    )
    return state
  return programs.rounds.with_outer_optimizers(state, outer_optimizers)


def _parts_of(source: pathlib.Path, parts: Parts) -> Parts:
  """Returns those of a run's parts that another run had too.

  Raises:
    RefusedError: If the other run had a part that this one lacks.
  """
  names = ()
  with contextlib.suppress(OSError, ValueError):  # `_saved_outer` says more.
    record = json_object((source / RECORD).read_bytes(), RECORD)
    names = record.get("handed_in", ())
  states_of = {"model", "inner_optimizer", "outer_optimizer", "exchange"}
  needed = states_of.intersection(names)
  if missing := sorted(needed - set(parts.names)):
    raise RefusedError(
      f"checkpoint.init_from={source} is a run to which {', '.join(missing)} "
      "was handed in: hand in the same to this one"
    )
  return Parts(**{name: getattr(parts, name) for name in needed})


def foreign_params(config: RunConfig, source: pathlib.Path) -> Tree:
  """Reads the parameters of a checkpoint that another library has written.

  Args:
    config: Config of the run, whose model has its sizes.
    source: Folder of the checkpoint.

  Raises:
    RefusedError: If it cannot be read, or holds another model.
  """
  try:
    shape, params = weights.read_checkpoint(source)
  except ValueError as error:
    raise RefusedError(f"checkpoint.init_from={source}: {error}") from error
  ours = vars(config.model.shape)
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
  config = check_source(workdir)
  one_device = Replicas(config.num_local_replicas)
  params, _ = _saved_outer(config, workdir, one_device, parts)
  return params


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
  programs = _programs(config, parts, config.mesh.num_replicas)
  with contextlib.closing(
    Checkpoints(source / FOLDER, read_only=True)
  ) as checkpoints:
    restored = checkpoints.restore(
      lambda record: replicas.abstract(
        states.abstract(
          programs,
          record["phase"],
          1 if config.meets else record["config"]["mesh"]["num_replicas"],
          record.get("in_flight", ()),
        ),
        None,
      )
    )
  if restored is None:
    raise RefusedError(f"checkpoint.init_from={source} has no whole checkpoint")
  state, record = restored
  # The run may have gone on with another number since.
  saved = record["config"]["mesh"]["num_replicas"]
  if saved != config.mesh.num_replicas:
    programs = _programs(config, parts, saved)
  params = evaluation.params_to_keep(programs, state)
  if isinstance(state, SharedState):
    return params, None
  if not programs.rounds.outer.is_shared:
    return params, None
  return params, [fragment.optimizer for fragment in state.fragments]


def _programs(config: RunConfig, parts: Parts, num_replicas: int) -> Programs:
  mesh = MeshConfig(num_replicas=num_replicas)
  return build.programs(dataclasses.replace(config, mesh=mesh), parts)


def _have_same_shapes(tree: Tree, other: Tree) -> bool:
  def shapes(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

  return shapes(tree) == shapes(other)
