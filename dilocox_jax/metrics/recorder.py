"""Records the numbers of a run; the trainer writes them through one object.

There are two files. Rows of `metrics.jsonl` depend on seed and config alone. A
run that was killed and resumed must write the same bytes as one that was not.
For that the trainer must record every row up to a step before it saves a
checkpoint of that step. Rows of `timing.jsonl` depend on the machine, so they
differ between two runs. TensorBoard gets the values of both.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat, SupportsInt

from dilocox_jax.checks import one_of
from dilocox_jax.metrics import lines, rows, tensorboard

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"


class Recorder:
  """Writes the rows of one run. It is a context manager."""

  def __init__(self, workdir: lines.Directory, resume_step: int | None = None):
    """Opens the files and cuts the rows that a restored run writes again.

    Args:
      workdir: Run directory; created if missing.
      resume_step: Inner step of the restored checkpoint. None starts a new run
        and cuts all rows. There are some if a run was killed before its first
        checkpoint.
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
    """Records a finished round; arguments are the fields of `rows.RoundRow`.

    Args:
      step: Inner steps finished.
      tokens: Tokens that all replicas together have seen so far.
      phase: "local", "data_parallel" or "single".
      loss: Mean loss over the round's steps and the replicas, in nats.
      loss_per_replica: Mean loss over the round's steps of each replica, [M].
      grad_norm: Norm of the inner gradient before clipping.
      learning_rate: Learning rate of the inner optimizer.
      sent_bytes: Bytes that one replica sent in this round.
      total_sent_bytes: Bytes that one replica has sent so far.
      drift: Mappings with the fields of `rows.DriftRow`; `cosine` may be None.
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
    """Records the validation losses of one evaluation, in nats per token.

    Args:
      step: Inner steps finished.
      tokens: Tokens that all replicas together have seen so far.
      total_sent_bytes: Bytes that one replica has sent so far.
      outer_loss: Loss of the outer parameters.
      mean_loss: Loss of the mean of the replicas' parameters.
      replica_loss: Loss of replica 0.
      flushed: Whether all pending exchanges had been applied.
      num_steps: Inner steps that the run was asked for. Given for the closing
        row only.
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
      num_steps: Inner steps that the run was asked for.
      **fields: Arguments of `record_evaluation` without `flushed`.
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
    """Records the time of an event; events must not overlap in time.

    Args:
      step: Inner steps finished when the event ended.
      event: "round", "compile", "evaluation" or "checkpoint".
      wall_s: Duration of the event in seconds.
      tokens_per_s: Tokens of all replicas per second in a round; None for
        other events.
      simulated_s: Seconds since the start on the run's simulated clock; None
        for a run without one.
    """
    one_of("event", event, rows.EVENTS)
    row = rows.Timing(
      step=int(step),
      event=event,
      wall_s=float(wall_s),
      tokens_per_s=rows.float_or_nan(tokens_per_s),
      simulated_s=rows.float_or_nan(simulated_s),
    )
    fields = dataclasses.asdict(row)
    # Runs without a clock have no column of NaN.
    if simulated_s is None:
      del fields["simulated_s"]
    self._timing.append(fields)
    if row.event == "round":
      self._board.scalars(row.step, {"time/tokens_per_s": row.tokens_per_s})

  def close(self) -> None:
    """Writes queued TensorBoard events and closes the files."""
    self._board.close()

  def __enter__(self) -> "Recorder":
    """Returns the recorder."""
    return self

  def __exit__(self, *exception: object) -> None:
    """Closes the recorder, also after an exception."""
    self.close()


class SilentRecorder(Recorder):
  """A recorder that writes nothing, for all processes but the first."""

  def __init__(self):
    """Opens nothing."""

  def record_round(self, **fields: Any) -> None:
    """Ignores a finished round."""

  def record_evaluation(self, **fields: Any) -> None:
    """Ignores validation losses."""

  def record_timing(self, **fields: Any) -> None:
    """Ignores the time of an event."""

  def close(self) -> None:
    """Does nothing, because nothing is open."""


def _drift(entry: Mapping[str, Any]) -> rows.DriftRow:
  return rows.DriftRow(
    fragment=int(entry["fragment"]),
    step=int(entry["step"]),
    cosine=rows.float_or_nan(entry["cosine"]),
    disagreement=float(entry["disagreement"]),
    pseudo_gradient_norm=float(entry["pseudo_gradient_norm"]),
    **{name: rows.float_or_nan(entry.get(name)) for name in rows.RANK_FIELDS},
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
