"""Figures of one run: loss, drift, simulated time and ranks.

Each function returns a figure, or None if a run has nothing to show in it. A
run with one replica has no drift, for example.
"""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilocox_jax.report import frame, panels, style, units
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.report.style import COLOURS, GREY, MARKERS, PALE

# The three losses are often equal. Larger hollow markers under smaller ones
# keep all of them visible.
_LOSSES = {
  "outer_loss": "validation, outer parameters",
  "mean_loss": "validation, replicas' mean",
  "replica_loss": "validation, replica 0",
}
_DRIFT = {
  "cosine": "mean pairwise cosine (1 = agree)",
  "disagreement": "norm of disagreement",
}
_RANKS = {
  "rank": ("sent", GREY),
  "energy_rank": ("measured, by energy", COLOURS[0]),
}


def _plot(
  ax: Axes, rows: Sequence[Any], across: str, up: str, divisor=1.0, **look: Any
) -> None:
  """Draws one field of some rows against another, which is divided first."""
  x = [getattr(row, across) / divisor for row in rows]
  ax.plot(x, [getattr(row, up) for row in rows], **look)


def _identity(run: LoadedRun) -> str:
  count = run.record["num_replicas"]
  noun = "replica" if count == 1 else "replicas"
  return f"{style.proper(run.record['method'])}, {count} {noun}"


def loss_figure(run: LoadedRun) -> Figure | None:
  """Draws training and validation loss against tokens."""
  if not run.rounds and not run.evaluations:
    return None
  title = "Training loss so far"
  if run.result:
    reached = units.human_loss(run.validation_loss)
    seen = units.human_tokens(run.result.tokens)
    title = f"Validation loss {reached} after {seen}"
  figure, (ax,) = style.frame(1, title)
  divisor, unit = units.tokens_unit(run.tokens)
  for index, (field, name) in enumerate(_LOSSES.items()):
    rows = [x for x in run.evaluations if not math.isnan(getattr(x, field))]
    if rows and (not index or run.record["num_replicas"] > 1):
      look: dict[str, Any] = {"marker": MARKERS[index], "label": name}
      look |= {"color": COLOURS[index], "markersize": 4 + 2 * index}
      look |= {"fillstyle": "none" if index else "full", "zorder": 5 - index}
      _plot(ax, rows, "tokens", field, divisor, **look)
  look = {"color": PALE, "zorder": 2}
  look |= {"label": "training, mean of replicas"}
  _plot(ax, run.rounds, "tokens", "loss", divisor, **look)
  cut = style.cut_high(ax, [row.loss for row in run.rounds], [])
  kind = f"measured: {_identity(run)}{cut}"
  style.label(ax, kind, f"{unit}, all replicas", "loss (nats a token)")
  style.legend(figure, ax, 2)
  return figure


def drift_figure(run: LoadedRun) -> Figure | None:
  """Draws pairwise cosine and disagreement by step.

  Fragments are gray lines, and their mean over each round is in front.
  """
  rounds = [row.drift for row in run.rounds if row.drift]
  if not rounds:
    return None
  entries = [entry for row in rounds for entry in row]
  fragments = {entry.fragment for entry in entries}
  figure, axes = style.frame(2, "How far the replicas agree on an update")
  for ax, (field, name) in zip(axes, _DRIFT.items(), strict=True):
    for fragment in fragments:
      rows = [entry for entry in entries if entry.fragment == fragment]
      _plot(ax, rows, "step", field, marker=".", color=PALE, linewidth=0.9)
    steps, means = (
      [frame.mean([getattr(entry, what) for entry in row]) for row in rounds]
      for what in ("step", field)
    )
    label = f"mean of fragments ({len(fragments)}, gray)"
    ax.plot(steps, means, COLOURS[0], marker="o", ms=3.5, label=label)
    style.label(ax, f"measured: {_identity(run)}", "inner steps", name)
  style.legend(figure, axes[0], 1)
  return figure


def time_figure(run: LoadedRun) -> Figure | None:
  """Draws validation loss against simulated time; None without a clock."""
  if not run.simulated_s:
    return None
  found = frame.frame_of({run.record["method"]: run})
  last = units.human_time(max(run.simulated_s.values()))
  reached = units.human_loss(run.validation_loss)
  title = f"Loss {reached} after {last} of simulated time"
  (clock,) = found.clocks
  return panels.loss_panel(found, clock, title)


def rank_figure(run: LoadedRun) -> Figure | None:
  """Draws ranks of the averaged updates and H; None without low rank."""
  drift = [entry for row in run.rounds for entry in row.drift]
  entries = [entry for entry in drift if math.isfinite(entry.rank)]
  if not entries:
    return None
  ranks = f"{entries[0].rank:.3g} to {entries[-1].rank:.3g}"
  title = f"Rank of the updates, sent from {ranks}, and length of the rounds"
  figure, (left, right) = style.frame(2, title)
  for field, (name, color) in _RANKS.items():
    _plot(left, entries, "step", field, label=name, color=color)
  steps = [0, *(row.step for row in run.rounds)]
  lengths = [
    (row.step, row.step - start)
    for row, start in zip(run.rounds, steps, strict=False)
    if row.phase == "rounds"
  ]
  ends, counts = zip(*lengths, strict=True)
  right.plot(ends, counts, color=COLOURS[2], drawstyle="steps-pre")
  kind = f"measured, averaged update: {_identity(run)}"
  style.label(left, kind, "inner steps", "rank, mean over matrices")
  style.label(right, "chosen", "inner steps", "inner steps a round (H)")
  for ax in (left, right):
    ax.set_ylim(bottom=0)
  style.legend(figure, left, 3)
  return figure
