"""Draws the figures of one run: loss, drift, simulated time and ranks.

The drift is how far the pseudo-gradients of the replicas disagree. A public
function returns None if the run has no values for its figure. For example, a
run without a low-rank codec has no ranks.
"""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilocox_jax.report import frame, panels, style, units
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.report.style import COLORS, GRAY, MARKERS, PALE

# Names of the validation losses by field of `Evaluation`. The three losses are
# often equal. The markers of the second and the third loss are larger and
# hollow, and lie under the first, so that all of them are visible.
_LOSSES = {
  "outer_loss": "validation, outer parameters",
  "mean_loss": "validation, replicas' mean",
  "replica_loss": "validation, replica 0",
}
# Names of the vertical axes, by field of a drift.
_DRIFT = {
  "cosine": "mean pairwise cosine (1 = agree)",
  "disagreement": "norm of disagreement",
}
# Name and color of each curve of ranks, by field of a drift.
_RANKS = {
  "rank": ("sent", GRAY),
  "energy_rank": ("measured, by energy", COLORS[0]),
}


def _plot(
  ax: Axes,
  rows: Sequence[Any],
  *,
  x_field: str,
  y_field: str,
  divisor: float = 1.0,
  **look: Any,
) -> None:
  """Draws one field of some rows against another field.

  Rows are objects with both fields. `divisor` divides the horizontal values,
  and `look` has arguments of `Axes.plot`.
  """
  x = [getattr(row, x_field) / divisor for row in rows]
  y = [getattr(row, y_field) for row in rows]
  ax.plot(x, y, **look)


def _identity(run: LoadedRun) -> str:
  """Returns a run's method and number of replicas: "DiLoCo, 4 replicas"."""
  num_replicas = run.record["num_replicas"]
  noun = "replica" if num_replicas == 1 else "replicas"
  return f"{style.proper(run.record['method'])}, {num_replicas} {noun}"


def loss_figure(run: LoadedRun) -> Figure | None:
  """Draws training and validation losses against tokens.

  The result is None if the run has neither a round nor an evaluation.
  """
  if not run.rounds and not run.evaluations:
    return None
  title = "Training loss so far"
  if run.result:
    loss = units.human_loss(run.validation_loss)
    tokens = units.human_tokens(run.result.tokens)
    title = f"Validation loss {loss} after {tokens}"
  figure, (ax,) = style.frame(1, title)
  divisor, unit = units.tokens_unit(run.tokens)
  for index, (field, name) in enumerate(_LOSSES.items()):
    is_of_replicas = index > 0
    if is_of_replicas and run.record["num_replicas"] == 1:
      continue  # It equals the loss of the outer parameters.
    rows = [
      row for row in run.evaluations if not math.isnan(getattr(row, field))
    ]
    if rows:
      _plot(
        ax,
        rows,
        x_field="tokens",
        y_field=field,
        divisor=divisor,
        marker=MARKERS[index],
        label=name,
        color=COLORS[index],
        markersize=4 + 2 * index,
        fillstyle="none" if is_of_replicas else "full",
        zorder=5 - index,
      )
  _plot(
    ax,
    run.rounds,
    x_field="tokens",
    y_field="loss",
    divisor=divisor,
    color=PALE,
    zorder=2,
    label="training, mean of replicas",
  )
  cut = style.cut_high(ax, [row.loss for row in run.rounds], [])
  kind = f"measured: {_identity(run)}{cut}"
  style.label(
    ax,
    kind,
    horizontal=f"{unit}, {run.counted_replicas}",
    vertical="loss (nats a token)",
  )
  style.legend(figure, ax, 2)
  return figure


def drift_figure(run: LoadedRun) -> Figure | None:
  """Draws how far the replicas' pseudo-gradients agree, against inner steps.

  One panel has the mean pairwise cosine, the other the norm of the
  disagreement. Gray lines are fragments (parts of the parameters), and the line
  in front is their mean in each round. The result is None if the run has
  recorded neither value.
  """
  drifts_of_rounds = [row.drift for row in run.rounds if row.drift]
  if not drifts_of_rounds:
    return None
  drifts = [drift for of_round in drifts_of_rounds for drift in of_round]
  fragments = {drift.fragment for drift in drifts}
  figure, axes = style.frame(2, "How far the replicas agree on an update")
  for ax, (field, name) in zip(axes, _DRIFT.items(), strict=True):
    for fragment in fragments:
      _plot(
        ax,
        [drift for drift in drifts if drift.fragment == fragment],
        x_field="step",
        y_field=field,
        marker=".",
        color=PALE,
        linewidth=0.9,
      )
    mean_steps = []
    mean_values = []
    for of_round in drifts_of_rounds:
      mean_steps.append(frame.mean([drift.step for drift in of_round]))
      mean_values.append(
        frame.mean([getattr(drift, field) for drift in of_round])
      )
    ax.plot(
      mean_steps,
      mean_values,
      COLORS[0],
      marker="o",
      ms=3.5,
      label=f"mean of fragments ({len(fragments)}, gray)",
    )
    style.label(
      ax,
      f"measured: {_identity(run)}",
      horizontal="inner steps",
      vertical=name,
    )
  style.legend(figure, axes[0], 1)
  return figure


def time_figure(run: LoadedRun) -> Figure | None:
  """Draws validation loss against simulated time.

  The result is None if the run has no evaluations, or if one of its evaluations
  has no simulated time.
  """
  run_frame = frame.frame_of({run.record["method"]: run})
  if not run_frame.clocks:
    return None
  end_time = units.human_time(max(run.simulated_s.values()))
  loss = units.human_loss(run.validation_loss)
  title = f"Loss {loss} after {end_time} of simulated time"
  (clock,) = run_frame.clocks
  return panels.loss_panel(run_frame, clock, title)


def rank_figure(run: LoadedRun) -> Figure | None:
  """Draws the ranks of the averaged updates, and the lengths of the rounds.

  The result is None if the run has recorded no ranks (no low-rank codec).
  """
  drifts = [
    drift
    for row in run.rounds
    for drift in row.drift
    if math.isfinite(drift.rank)
  ]
  if not drifts:
    return None
  ranks = f"{drifts[0].rank:.3g} to {drifts[-1].rank:.3g}"
  title = f"Rank of the updates, sent from {ranks}, and length of the rounds"
  figure, (left, right) = style.frame(2, title)
  for field, (name, color) in _RANKS.items():
    _plot(left, drifts, x_field="step", y_field=field, label=name, color=color)
  end_steps = []
  lengths = []
  start_step = 0
  for row in run.rounds:
    # Rows of data-parallel steps have no length of a round.
    if row.phase == "rounds":
      end_steps.append(row.step)
      lengths.append(row.step - start_step)
    start_step = row.step
  right.plot(end_steps, lengths, color=COLORS[2], drawstyle="steps-pre")
  kind = f"measured, averaged update: {_identity(run)}"
  style.label(
    left,
    kind,
    horizontal="inner steps",
    vertical="rank, mean over matrices",
  )
  style.label(
    right,
    "chosen",
    horizontal="inner steps",
    vertical="inner steps a round (H)",
  )
  for ax in (left, right):
    ax.set_ylim(bottom=0)
  style.legend(figure, left, 3)
  return figure
