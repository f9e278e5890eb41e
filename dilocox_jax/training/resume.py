"""Takes up a run from its checkpoint, perhaps with another number of replicas.

A run with other settings is refused, since its rows would mean two things. The
number of replicas may change, always at the boundary of a round, where every
checkpoint lies. A replica too many is dropped, together with what it has in
flight. Who is new counts as a replica that was away until then, and begins by
the same rule (`plan.schedule.membership`). The text is divided anew.
"""

import logging
from typing import Any

from dilocox_jax.checks import changed_fields, flat
from dilocox_jax.config import (
  FREE_ON_RESUME,
  RunConfig,
  to_plan,
)
from dilocox_jax.config.run import unfit_for_absences
from dilocox_jax.outer.round_states import RoundState
from dilocox_jax.training import states
from dilocox_jax.training.build import Programs
from dilocox_jax.training.checkpoint import Checkpoints, RefusedError
from dilocox_jax.training.clock import Clock
from dilocox_jax.training.parts import NO_PARTS, Parts
from dilocox_jax.training.states import TrainingState


def resumed_state(
  config: RunConfig,
  programs: Programs,
  checkpoints: Checkpoints,
  corpus_digest: str,
  parts: Parts = NO_PARTS,
) -> tuple[TrainingState, dict[str, Any]] | None:
  """Returns the state and the record of this run's newest whole checkpoint.

  Args:
    config: Config that the user gives now.
    programs: Programs of the run.
    checkpoints: Checkpoints of the run directory.
    corpus_digest: Digest of the text as it is now.
    parts: Parts that the caller hands in now.

  Returns:
    The state and the record; None if there is no checkpoint.

  Raises:
    RefusedError: If the checkpoints belong to a run with other settings.
  """

  def template(record: dict[str, Any]) -> TrainingState:
    _check_same_run(config, corpus_digest, record)
    check_same_parts(record, parts)
    return states.abstract(
      programs,
      record["phase"],
      _other_replicas(config, record),
      record.get("in_flight", ()),
    )

  restored = checkpoints.restore(template)
  if not restored:
    return None
  state, record = restored
  step = record["position"]["step"]
  logging.getLogger(__name__).info(
    "continuing at step %d of %d", step, config.total_steps
  )
  count = _other_replicas(config, record)
  if count:
    logging.getLogger(__name__).info(
      "mesh.num_replicas: %d -> %d", count, config.mesh.num_replicas
    )
    if isinstance(state, RoundState):
      state = programs.rounds.resized(state)
  if isinstance(state, RoundState) and count:
    _check_absences(config, "a replica that begins anew")
    if parts.exchange:
      raise RefusedError(
        "a replica that begins anew does not go with an exchange that is "
        "handed in: name its codec in the config"
      )
    record["controller"]["joined"] = _joined(config, record)
  return state, record


def _check_absences(config: RunConfig, cause: str) -> None:
  """Raises RefusedError if replicas of the run cannot come and go."""
  if reason := unfit_for_absences(config):
    raise RefusedError(f"{cause} does not go with {reason}")


def _other_replicas(config: RunConfig, record: dict[str, Any]) -> int | None:
  """Returns how many replicas a checkpoint has; None if as many as the run.

  Raises:
    RefusedError: If their number may not change.
  """
  saved = record["config"]["mesh"]["num_replicas"]
  if saved == config.mesh.num_replicas or config.meets:
    return None
  if reason := unfit_for_absences(config):
    raise RefusedError(
      f"mesh.num_replicas: {saved} -> {config.mesh.num_replicas} does not go "
      f"with {reason}, or set the saved number again"
    )
  return saved


def _joined(config: RunConfig, record: dict[str, Any]) -> list[list[int]]:
  """Returns from when on the replicas are there that were not at first.

  Args:
    config: Config of the run.
    record: Record of the checkpoint.
  """
  saved = record["config"]["mesh"]["num_replicas"]
  count = config.mesh.num_replicas
  plan = to_plan.run_plan(config)
  step = plan.schedule_step(record["position"]["step"])
  last_round = plan.method.schedule.round_at(step)[0] - 1
  kept = [each for each in record["controller"]["joined"] if each[0] < count]
  new = range(saved, count) if last_round >= 0 else ()
  return kept + [[m, 0, last_round] for m in new]


def set_clock(clock: Clock | None, saved: dict[str, Any] | None) -> None:
  """Sets a run's clock to what it was; a run keeps the one it began with.

  Args:
    clock: Clock of the run as it is started now, if it has one.
    saved: State of the clock in the checkpoint; None if there was none.

  Raises:
    RefusedError: If the two do not go together.
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
  config: RunConfig, corpus_digest: str, record: dict[str, Any]
) -> None:
  """Raises RefusedError if a checkpoint's record is that of another run."""
  changes = changed_settings(
    record["config"], record["corpus_digest"], config, corpus_digest
  )
  if not changes:
    return
  advice = "take another --workdir, or set the saved values again"
  if any(change.startswith("total_steps:") for change in changes):
    advice += (
      "; to train longer, start a new run in another --workdir from this one's "
      "parameters with checkpoint.init_from"
    )
  raise RefusedError(
    "the work directory holds a run with other settings (saved value -> new "
    f"value: {'; '.join(changes)}): {advice}"
  )


def check_same_parts(record: dict[str, Any], parts: Parts) -> None:
  """Refuses other parts than those with which a run began.

  The data is not compared by its name, because the digest of the text is.

  Args:
    record: Record of the run or of a checkpoint.
    parts: Parts that the caller hands in now.

  Raises:
    RefusedError: If their names differ.
  """
  saved = set(record.get("handed_in", ())) - {"data"}
  given = set(parts.names) - {"data"}
  if saved != given:
    raise RefusedError(
      "the work directory holds a run in which other parts were handed in "
      f"({', '.join(sorted(saved)) or 'none'}; now "
      f"{', '.join(sorted(given)) or 'none'}): hand in the same, or take "
      "another work directory"
    )


def changed_settings(
  saved: dict[str, Any], digest: str, config: RunConfig, corpus_digest: str
) -> list[str]:
  """Returns the differences that make a saved run another: "seed: 0 -> 1".

  Args:
    saved: Config of the saved run, with its sections.
    digest: Digest of the saved run's text.
    config: Config of the run that is to go on.
    corpus_digest: Digest of this run's text.
  """
  # A field that is newer than the saved run had its default there.
  old = flat(RunConfig().to_mapping()) | flat(saved)
  changes = changed_fields(old, config.to_mapping(), FREE_ON_RESUME)
  if digest != corpus_digest:
    changes.append(f"corpus: {digest} -> {corpus_digest}")
  return changes
