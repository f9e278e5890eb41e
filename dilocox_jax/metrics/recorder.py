"""The one object the trainer talks to about numbers.

It keeps what repeats (`metrics.jsonl`) apart from the clock (`timing.jsonl`):
rows of the first depend on seed and config alone, so a killed and resumed run
must produce the same bytes as one that was not. For that the trainer must have
recorded every row up to a step before it saves a checkpoint of that step.
TensorBoard gets the same values on the side.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat, SupportsInt

from dilocox_jax.checks import one_of
from dilocox_jax.metrics import lines, rows, tensorboard

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"


class Recorder:
  """Writes the rows of one run; use it as a context manager."""

  def __init__(self, workdir: lines.Directory, resume_step: int | None = None):
    """Opens the files and cuts what a restored run will do again.

    Args:
      workdir: The run directory; created when missing.
      resume_step: Inner step of the restored checkpoint. None starts afresh:
        rows left by a run that was killed before its first checkpoint go.
    """
    workdir = lines.make_directory(workdir)
    last_step = -1 if resume_step is None else resume_step
    self._metrics = lines.JsonLines(workdir / METRICS)
    self._timing = lines.JsonLines(workdir / TIMING)
    self._metrics.truncate_after(last_step)
    self._timing.truncate_after(last_step)
    self._board = tensorboard.TensorBoardWriter(
      workdir / "tensorboard", last_step + 1
    )

  def record_round(
    self,
    *,
    step: SupportsInt,
    tokens: SupportsInt,
    phase: str,
    loss: SupportsFloat,
    loss_per_replica: Iterable[SupportsFloat],
    grad_norm: SupportsFloat,
    learning_rate: SupportsFloat,
    sent_bytes: SupportsInt,
    total_sent_bytes: SupportsInt,
    drift: Iterable[Mapping[str, Any]] = (),
  ) -> None:
    """Records a finished round; the arguments are `rows.Round`'s fields.

    Args:
      step: Inner steps finished.
      tokens: Of all replicas so far.
      phase: "local", "data_parallel" or "single".
      loss: Mean over the round.
      loss_per_replica: M values.
      grad_norm: Inner gradient's norm.
      learning_rate: Inner optimizer's.
      sent_bytes: Of one replica in this round.
      total_sent_bytes: Of one replica so far.
      drift: Mappings with `rows.Drift`'s fields; `cosine` may be None.
    """
    one_of("phase", phase, rows.PHASES)
    row = rows.RoundRow(
      step=int(step),
      tokens=int(tokens),
      phase=phase,
      loss=float(loss),
      loss_per_replica=[float(x) for x in loss_per_replica],
      grad_norm=float(grad_norm),
      learning_rate=float(learning_rate),
      sent_bytes=int(sent_bytes),
      total_sent_bytes=int(total_sent_bytes),
      drift=[_drift(entry) for entry in drift],
    )
    self._metrics.append({"kind": "round", **dataclasses.asdict(row)})
    self._board.scalars(row.step, _round_scalars(row))

  def record_evaluation(
    self,
    *,
    step: SupportsInt,
    tokens: SupportsInt,
    total_sent_bytes: SupportsInt,
    outer_loss: SupportsFloat,
    mean_loss: SupportsFloat,
    replica_loss: SupportsFloat,
    flushed: bool = False,
    num_steps: int | None = None,
  ) -> None:
    """Records validation losses, side by side.

    Args:
      step: Inner steps finished.
      tokens: Of all replicas so far.
      total_sent_bytes: Of one replica so far.
      outer_loss: Of the outer parameters.
      mean_loss: Of the replicas' mean.
      replica_loss: Of replica 0.
      flushed: Whether everything pending had been applied.
      num_steps: Given for the closing row only: the steps asked for.
    """
    row = rows.Evaluation(
      step=int(step),
      tokens=int(tokens),
      total_sent_bytes=int(total_sent_bytes),
      outer_loss=float(outer_loss),
      mean_loss=float(mean_loss),
      replica_loss=float(replica_loss),
      flushed=bool(flushed),
    )
    kind: dict[str, Any] = {"kind": "evaluation"}
    if num_steps is not None:
      kind = {"kind": "final", "num_steps": int(num_steps)}
    self._metrics.append(kind | dataclasses.asdict(row))
    losses = ("outer_loss", "mean_loss", "replica_loss")
    values = {f"validation/{name}": getattr(row, name) for name in losses}
    self._board.scalars(row.step, values)

  def record_final(self, *, num_steps: int, **fields: Any) -> None:
    """Records the closing row, after the flush.

    Args:
      num_steps: Inner steps the run was asked for.
      **fields: As for `record_evaluation`, without `flushed`.
    """
    self.record_evaluation(num_steps=num_steps, flushed=True, **fields)

  def record_timing(
    self,
    *,
    step: SupportsInt,
    event: str,
    wall_s: SupportsFloat,
    tokens_per_s: SupportsFloat | None = None,
    simulated_s: SupportsFloat | None = None,
  ) -> None:
    """Records what an event cost; events must not overlap in time.

    Args:
      step: Inner steps finished when it ended.
      event: "round", "compile", "evaluation" or "checkpoint".
      wall_s: Duration of the event.
      tokens_per_s: For rounds; None otherwise.
      simulated_s: What the run's clock says, if it carries one.
    """
    one_of("event", event, rows.EVENTS)
    row = rows.Timing(
      step=int(step),
      event=event,
      wall_s=float(wall_s),
      tokens_per_s=rows.number(tokens_per_s),
      simulated_s=rows.number(simulated_s),
    )
    fields = dataclasses.asdict(row)
    if simulated_s is None:
      del fields["simulated_s"]
    self._timing.append(fields)
    if row.event == "round":
      self._board.scalars(row.step, {"time/tokens_per_s": row.tokens_per_s})

  def close(self) -> None:
    """Writes what is queued and closes the files."""
    self._board.close()

  def __enter__(self) -> "Recorder":
    """Returns the recorder."""
    return self

  def __exit__(self, *exception: object) -> None:
    """Closes, whatever happened."""
    self.close()


class SilentRecorder(Recorder):
  """Takes everything and writes nothing: for processes beside the main one."""

  def __init__(self):
    """Opens nothing."""

  def record_round(self, **fields: Any) -> None:
    """Forgets a finished round."""

  def record_evaluation(self, **fields: Any) -> None:
    """Forgets validation losses."""

  def record_timing(self, **fields: Any) -> None:
    """Forgets what an event cost."""

  def close(self) -> None:
    """Closes nothing."""


def _drift(entry: Mapping[str, Any]) -> rows.DriftRow:
  return rows.DriftRow(
    fragment=int(entry["fragment"]),
    step=int(entry["step"]),
    cosine=rows.number(entry["cosine"]),
    disagreement=float(entry["disagreement"]),
    pseudo_gradient_norm=float(entry["pseudo_gradient_norm"]),
    **{name: rows.number(entry.get(name)) for name in rows.RANK_FIELDS},
  )


def _round_scalars(row: rows.RoundRow) -> dict[str, float | int]:
  values: dict[str, float | int] = {
    "train/loss": row.loss,
    "train/grad_norm": row.grad_norm,
    "train/learning_rate": row.learning_rate,
    "wire/sent_bytes": row.sent_bytes,
    "wire/total_sent_bytes": row.total_sent_bytes,
  }
  for entry in row.drift:
    suffix = f"fragment_{entry.fragment}"
    values[f"drift/cosine/{suffix}"] = entry.cosine
    values[f"drift/disagreement/{suffix}"] = entry.disagreement
    for name in rows.RANK_FIELDS:
      if not math.isnan(getattr(entry, name)):
        values[f"rank/{name}/{suffix}"] = getattr(entry, name)
  return values
