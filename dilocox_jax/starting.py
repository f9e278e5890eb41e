"""Where a run starts: at the beginning, from another run, or where it was.

A run directory with a whole checkpoint is continued, and only by a config
that means the same run on the same text; anything else is refused before an
array is read.
"""

import dataclasses
import logging
import pathlib
from typing import Any

from dilocox_jax import inherit, states
from dilocox_jax.assembly import Programs
from dilocox_jax.checkpoint import Checkpoints, RefusedError
from dilocox_jax.config import FREE_ON_RESUME, RunConfig
from dilocox_jax.mapping import changed_fields
from dilocox_jax.states import State


@dataclasses.dataclass
class Position:
  """How far a run is; part of every checkpoint's record.

  Attributes:
    step: Inner steps finished.
    tokens: Tokens seen by all replicas together.
    total_sent_bytes: What one replica has put on the wire.
    is_finished: Whether the flush and the last evaluation are done.
    simulated_s: What the run's clock says, if it carries one (seconds).
  """

  step: int = 0
  tokens: int = 0
  total_sent_bytes: int = 0
  is_finished: bool = False
  simulated_s: float | None = None


def first_state(config: RunConfig, programs: Programs, phase: str) -> State:
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
    return inherit.inherited_state(
      config, programs, phase, pathlib.Path(source)
    )
  params = states.first_params(programs, phase, config.seed)
  return states.fresh(programs, phase, params)


def resumed_state(
  config: RunConfig,
  programs: Programs,
  checkpoints: Checkpoints,
  corpus_digest: str,
) -> tuple[State, dict[str, Any]] | None:
  """The newest whole state of this very run, and its record.

  Args:
    config: The run as it is asked for now.
    programs: Its programs.
    checkpoints: What is there.
    corpus_digest: Of the text as it is now.

  Raises:
    RefusedError: If the checkpoints are of a run that means something else.
  """

  def template(record: dict[str, Any]) -> State:
    _check_same_run(config, corpus_digest, record)
    return states.abstract(programs, record["phase"])

  restored = checkpoints.restore(template)
  if restored:
    position = Position(**restored[1]["position"])
    logging.getLogger(__name__).info(
      "continuing at step %d of %d", position.step, config.total_steps
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
