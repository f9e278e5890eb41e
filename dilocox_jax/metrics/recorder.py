"""Records the numbers of a run; the trainer writes them through one object.

There are two files. Rows of `metrics.jsonl` depend on seed and config alone. A
run that was killed and resumed must write the same bytes as one that was not.
For that the trainer must record every row up to a step before it saves a
checkpoint of that step. Rows of `timing.jsonl` depend on the machine, so they
differ between two runs. TensorBoard gets the values of both.
"""

import contextlib
import dataclasses
import math
from typing import Any

from dilocox_jax.checks import one_of
from dilocox_jax.metrics import lines, rows, tensorboard

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"


class Recorder(contextlib.AbstractContextManager["Recorder"]):
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
    self._metrics = lines.JsonLines(workdir / METRICS, last_step)
    self._timing = lines.JsonLines(workdir / TIMING, last_step)
    self._board = tensorboard.TensorBoardWriter(
      workdir / "tensorboard", last_step + 1
    )

  def record_round(self, **fields: Any) -> None:
    """Records a finished round.

    Args:
      **fields: Fields of `rows.RoundRow`, as Python, numpy or JAX numbers.
        `drift` is a sequence of mappings with the fields of `rows.DriftRow`.
    """
    row = rows.from_json(rows.RoundRow, fields)
    one_of("phase", row.phase, rows.PHASES)
    self._metrics.append({"kind": "round", **dataclasses.asdict(row)})
    self._board.scalars(row.step, _round_scalars(row))

  def record_evaluation(
    self, *, num_steps: int | None = None, **fields: Any
  ) -> None:
    """Records the validation losses of one evaluation.

    Args:
      num_steps: Inner steps that the run was asked for. Given for the closing
        row only, which is recorded after the flush.
      **fields: Fields of `rows.Evaluation` without `flushed`.
    """
    fields["flushed"] = num_steps is not None
    row = rows.from_json(rows.Evaluation, fields)
    kind: dict[str, Any] = {"kind": "evaluation"}
    if num_steps is not None:
      kind = {"kind": "final", "num_steps": int(num_steps)}
    fields_of_row = dataclasses.asdict(row)
    if not row.sets:  # Most runs have no such texts and no such column.
      del fields_of_row["sets"]
    self._metrics.append(kind | fields_of_row)
    losses = ("outer_loss", "mean_loss", "replica_loss")
    values = {f"validation/{name}": getattr(row, name) for name in losses}
    values |= {f"validation/{name}": loss for name, loss in row.sets.items()}
    values = {k: value for k, value in values.items() if math.isfinite(value)}
    self._board.scalars(row.step, values)

  def record_timing(self, **fields: Any) -> None:
    """Records the time of an event; events must not overlap in time.

    Args:
      **fields: Fields of `rows.Timing`. Those without a value may be None.
    """
    row = rows.from_json(rows.Timing, fields)
    one_of("event", row.event, rows.EVENTS)
    values = dataclasses.asdict(row)
    # Runs without a clock or a throttled link have no columns of NaN.
    for name in ("simulated_s", "exposed_s", "link_bytes"):
      if math.isnan(values[name]):
        del values[name]
    self._timing.append(values)
    if row.event == "round":
      self._board.scalars(row.step, {"time/tokens_per_s": row.tokens_per_s})

  def __exit__(self, *exception: object) -> None:
    """Writes queued TensorBoard events, also after an exception."""
    self._board.close()


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

  def __exit__(self, *exception: object) -> None:
    """Does nothing, because nothing is open."""


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
