"""Continues a run from its checkpoint, if its settings are still the same.

A checkpoint that was saved with other settings is refused, because the rows of
metrics before and after it would belong to different runs. Only the fields in
`config.free_on_resume()` may differ.
"""

import logging
import pathlib
import re
from typing import Any

from dilocox_jax.checks import changed_fields, flat, json_file
from dilocox_jax.config import RunConfig, free_on_resume
from dilocox_jax.distributed import processes
from dilocox_jax.metrics.recorder import METRICS
from dilocox_jax.metrics.work_directory import CONFIG, RECORD, RefusedError
from dilocox_jax.report.page import PAGE
from dilocox_jax.training import states
from dilocox_jax.training.build import Programs
from dilocox_jax.training.checkpoint import FOLDER, Checkpoints, saved_steps
from dilocox_jax.training.overrides import NO_OVERRIDES, Overrides
from dilocox_jax.training.run_clock import Clock
from dilocox_jax.training.states import TrainingState


def check_nothing_is_lost(
  values: dict[str, Any], workdir: pathlib.Path, corpus_digest: str
) -> None:
  """Refuses a directory if starting at step 0 would delete results of a run.

  A run that was killed before its first save may start again, because it will
  compute the same rows again, equal in every bit. So a directory with a run but
  without a checkpoint is accepted only if all of this is true:

  - The config in the directory is that of the run that is to start. Only fields
    that may change when a run continues may differ (`config.free_on_resume`).
  - The digest of the data in `run.json` is that of the run that is to start. If
    `run.json` is missing or cannot be read, this is not checked.
  - The folder of checkpoints exists.
  - There is no report, which a run writes at its end.

  All processes must call this function, before `Checkpoints` creates a folder.

  Args:
    values: Config of the run that is to start, as a nested dict.
    workdir: The run directory.
    corpus_digest: Digest of the data of the run that is to start.

  Raises:
    RefusedError: If results would be lost. All processes raise it.
  """
  reason = ""
  if processes.is_main() and not saved_steps(workdir / FOLDER):
    reason = _lost_run(values, workdir, corpus_digest)
  reason = processes.from_main(reason)
  if reason:
    raise RefusedError(reason)


def _lost_run(
  values: dict[str, Any], workdir: pathlib.Path, corpus_digest: str
) -> str:
  """Describes the results that a new run would delete.

  The result is "" if there are none, or if the new run will compute the same.
  """
  files = [
    name for name in (CONFIG, RECORD, METRICS) if (workdir / name).exists()
  ]
  if not files:
    return ""
  # A run makes the folder first, and saves a checkpoint before it writes the
  # report. So without the folder, or with a report, checkpoints were deleted.
  reason = "its checkpoints are gone"
  if (workdir / FOLDER).is_dir() and not (workdir / PAGE).exists():
    reason = _other_run(values, workdir, corpus_digest)
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
  values: dict[str, Any], workdir: pathlib.Path, corpus_digest: str
) -> str:
  """Describes how a directory's run differs from the run that is to start.

  The result is a part of a message; "" if the two runs do not differ. If the
  directory's config cannot be read, the result says only that.
  """
  try:
    digest = json_file(workdir / RECORD)["corpus_digest"]
  except (ValueError, KeyError):
    digest = corpus_digest  # The run was killed before it wrote this file.
  try:
    saved = json_file(workdir / CONFIG)
  except ValueError:
    return f"its {CONFIG} cannot be read"
  changes = _changes(saved, digest, values, corpus_digest)
  if not changes:
    return ""
  return f"it has other settings ({'; '.join(changes)})"


def resumed_state(
  values: dict[str, Any],
  programs: Programs,
  checkpoints: Checkpoints,
  corpus_digest: str,
  overrides: Overrides = NO_OVERRIDES,
) -> tuple[TrainingState, dict[str, Any]] | None:
  """Reads the newest undamaged checkpoint of this run.

  If newer checkpoints are damaged, they are moved to the folder
  "broken_checkpoints" in the run directory. All processes must call this
  function.

  The checkpoint fits this run only if it was saved with the same config, data
  and overrides. Fields in `config.free_on_resume()` may differ. Overrides are
  compared by `check_same_overrides`.

  Args:
    values: Config of this run, as a nested dict.
    programs: Programs of this run.
    checkpoints: Checkpoints of the run directory.
    corpus_digest: Digest of the data of this run.
    overrides: Objects in place of those that the config names.

  Returns:
    The state and the record of the checkpoint. The record is the JSON values
    that were saved with the state. None if there is no checkpoint.

  Raises:
    RefusedError: If the checkpoint does not fit this run, or if all checkpoints
      are damaged.
  """

  # `restore` calls this with the record of the checkpoint.
  def template(record: dict[str, Any]) -> TrainingState:
    _check_same_run(values, corpus_digest, record)
    check_same_overrides(record, overrides)
    return states.abstract(programs, record["phase"], record["in_flight"])

  restored = checkpoints.restore(template)
  if not restored:
    return None
  state, record = restored
  step = record["position"]["step"]
  logging.getLogger(__name__).info(
    "continuing at step %d of %d", step, programs.plan.total_steps
  )
  return state, record


def set_clock(clock: Clock | None, saved: dict[str, Any] | None) -> None:
  """Restores the simulated clock of a run that continues.

  Args:
    clock: Clock of the run; None: the run simulates no time.
    saved: State of the clock in the checkpoint; None: it has none.

  Raises:
    RefusedError: If only one of the two is None, or if the state is from a
      clock with another cluster or another duration of a step (`--step_s`).
  """
  if (saved is None) != (clock is None):
    began = "without" if saved is None else "with"
    raise RefusedError(
      f"the work directory holds a run that began {began} --cluster: go on "
      "likewise, or take another --workdir"
    )
  if clock and saved:
    try:
      clock.set_state(saved)
    except ValueError as error:
      raise RefusedError(str(error)) from error


def _check_same_run(
  values: dict[str, Any], corpus_digest: str, record: dict[str, Any]
) -> None:
  """Raises RefusedError if a checkpoint has other settings than this run."""
  digest = record["corpus_digest"]
  changes = _changes(record["config"], digest, values, corpus_digest)
  if not changes:
    return
  advice = "take another --workdir, or set the saved values again"
  # Each line begins with the dotted name of a field (`checks.changed_fields`).
  if any(re.match("total_steps|mesh.num_replicas", line) for line in changes):
    advice += (
      "; to train longer or with other replicas, start a new run in another "
      "--workdir from this one's parameters with checkpoint.init_from"
    )
  raise RefusedError(
    "the work directory holds a run with other settings (saved value -> new "
    f"value: {'; '.join(changes)}): {advice}"
  )


def check_same_overrides(record: dict[str, Any], overrides: Overrides) -> None:
  """Refuses to continue a run with other overrides than it began with.

  Overrides are objects in place of those that a config names. The objects
  themselves are not compared. What is compared are the names of the fields that
  are set, such as "model", and the digest of the frozen weights. The name
  "data" is left out: `resumed_state` compares the digest of the data.

  Args:
    record: Record of the run (`run.json`) or of its checkpoint.
    overrides: Overrides that are passed now.

  Raises:
    RefusedError: If the names, or the digests of the frozen weights, differ.
  """
  saved_names = sorted(set(record.get("overrides", ())) - {"data"})
  new_names = sorted(set(overrides.names) - {"data"})
  if saved_names != new_names:
    raise RefusedError(
      "the work directory holds a run with other overrides "
      f"({', '.join(saved_names) or 'none'}; now "
      f"{', '.join(new_names) or 'none'}): pass the same, or take another "
      "work directory"
    )


def _changes(
  saved: dict[str, Any],
  saved_digest: str,
  values: dict[str, Any],
  corpus_digest: str,
) -> list[str]:
  """Returns the differences between a saved run and a run that continues it.

  Example: "seed: 0 -> 1". Fields that may change when a run continues
  (`free_on_resume`) are not compared.
  """
  # If a field is newer than the saved run, the run had the field's default.
  saved_fields = flat(RunConfig().to_mapping()) | flat(saved)
  changes = changed_fields(saved_fields, values, free_on_resume())
  if saved_digest != corpus_digest:
    changes.append(f"corpus: {saved_digest} -> {corpus_digest}")
  return changes
