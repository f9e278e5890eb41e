"""Figures of one run: loss, drift, bytes, simulated time and ranks.

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

# Field, label, line, marker size and width. The three losses are often equal.
# Larger hollow markers under smaller ones keep all of them visible.
_LOSSES = (
  ("outer_loss", "outer parameters", "-", 4, 1.4),
  ("mean_loss", "replicas' mean", "--", 6, 1.8),
  ("replica_loss", "replica 0", ":", 8, 2.2),
)
_DRIFT = {
  "cosine": "mean pairwise cosine (1 = agree)",
  "disagreement": "norm of disagreement",
}
_RANKS = (
  ("rank", "sent", GREY, "steps-mid", "-"),
  ("energy_rank", "measured, by energy", COLOURS[0], "default", "-"),
  ("stable_rank", "measured, stable rank", COLOURS[1], "default", "--"),
)


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
  shown = _LOSSES if run.record["num_replicas"] > 1 else _LOSSES[:1]
  for index, (field, name, line, size, width) in enumerate(shown):
    if all(math.isnan(getattr(row, field)) for row in run.evaluations):
      continue  # It was not computed.
    colour = COLOURS[index]
    look: dict[str, Any] = {"color": colour, "linestyle": line}
    look |= {"linewidth": width, "label": f"validation, {name}"}
    look |= {"marker": MARKERS[index], "markersize": size, "zorder": 5 - index}
    look |= {"markerfacecolor": "none" if index else colour}
    _plot(ax, run.evaluations, "tokens", field, divisor, **look)
  look = {"color": PALE, "linewidth": 1.4, "zorder": 2}
  look |= {"label": "training, mean of replicas"}
  _plot(ax, run.rounds, "tokens", "loss", divisor, **look)
  warm = [row.tokens for row in run.rounds if row.phase != "rounds"]
  if warm and len(warm) < len(run.rounds):
    end = warm[-1] / divisor
    ax.axvspan(0, end, color="#F1F1F1", zorder=0, label="warm start")
  cut = style.cut_high(ax, [row.loss for row in run.rounds], [])
  kind = f"measured: {_identity(run)}{cut}"
  style.label(ax, kind, f"{unit}, all replicas", "loss (nats a token)")
  style.legend(figure, ax, 2)
  return figure


def drift_figure(run: LoadedRun) -> Figure | None:
  """Draws pairwise cosine and disagreement by step, one line per fragment.

  With more than six fragments all lines are grey, and their mean over each
  round is in front.
  """
  entries = [entry for row in run.rounds for entry in row.drift]
  if not entries:
    return None
  fragments = sorted({entry.fragment for entry in entries})
  figure, axes = style.frame(2, "How far the replicas agree on an update")
  is_crowd = len(fragments) > panels.MAX_FRONT
  for ax, (field, name) in zip(axes, _DRIFT.items(), strict=True):
    for index, fragment in enumerate(fragments):
      look: dict[str, Any] = {"color": PALE, "marker": ".", "linewidth": 0.9}
      if not is_crowd:
        look = {"color": COLOURS[index], "marker": MARKERS[index]}
        look |= {"label": f"fragment {fragment}"}
      rows = [entry for entry in entries if entry.fragment == fragment]
      _plot(ax, rows, "step", field, markersize=3, **look)
    if is_crowd:
      rounds = [row.drift for row in run.rounds if row.drift]
      look = {"label": f"mean of {len(fragments)} fragments (grey)"}
      steps, means = (
        [frame.mean([getattr(entry, what) for entry in row]) for row in rounds]
        for what in ("step", field)
      )
      ax.plot(
        steps, means, color=COLOURS[0], marker="o", markersize=3.5, **look
      )
    style.label(ax, f"measured: {_identity(run)}", "inner steps", name)
  if len(fragments) > 1:
    style.legend(figure, axes[0], panels.MAX_FRONT)
  return figure


def bytes_figure(run: LoadedRun) -> Figure | None:
  """Draws the bytes that one replica sent: in all, and in each round.

  The flush takes no inner steps, so it is a vertical line at the end of both
  panels.
  """
  rows = run.rounds
  if not any(row.sent_bytes for row in rows):
    return None
  total, before = run.total_sent_bytes, rows[-1].total_sent_bytes
  flushed = total - before
  title = f"One replica sent {units.human_bytes(total)} in {run.steps:,} steps"
  if flushed:
    title += f", {units.human_bytes(flushed)} of it in the flush"
  figure, axes = style.frame(2, title)
  edges = [0, *(row.step for row in rows)]
  kind = f"derived from the plan: {_identity(run)}"
  divisor, unit = units.bytes_unit(total)
  sums = [0.0, *(row.total_sent_bytes / divisor for row in rows)]
  axes[0].plot(edges, sums, COLOURS[0], drawstyle="steps-post", label="rounds")
  _flush(axes[0], edges[-1], before / divisor, total / divisor)
  style.label(axes[0], kind, "inner steps", f"sent since the start ({unit})")
  largest = max(flushed, *(row.sent_bytes for row in rows))
  divisor, unit = units.bytes_unit(largest)
  heights = [row.sent_bytes / divisor for row in rows]
  axes[1].stairs(heights, edges, fill=True, color=COLOURS[0], alpha=0.4)
  _flush(axes[1], edges[-1], 0.0, flushed / divisor)
  axes[1].set_ylim(0, 1.08 * largest / divisor)
  style.label(axes[1], kind, "inner steps", f"sent in the round ({unit})")
  style.legend(figure, axes[0], 2)
  return figure


def _flush(ax: Axes, step: int, low: float, high: float) -> None:
  if high > low:
    look = {"color": COLOURS[1], "marker": "o", "markersize": 4}
    ax.plot([step, step], [low, high], linewidth=2.5, label="flush", **look)


def time_figure(run: LoadedRun) -> Figure | None:
  """Draws validation loss against simulated time; None without a clock."""
  if not run.simulated_s:
    return None
  found = frame.frame_of({run.record["method"]: run})
  last = units.human_time(max(run.simulated_s.values()))
  reached = units.human_loss(run.validation_loss)
  title = f"Loss {reached} after {last} of simulated time"
  return panels.loss_panels(found, list(found.clocks), title, (6.4, 4.2))


def rank_figure(run: LoadedRun) -> Figure | None:
  """Draws ranks of the averaged updates and H; None without low rank."""
  drift = [entry for row in run.rounds for entry in row.drift]
  entries = [entry for entry in drift if math.isfinite(entry.rank)]
  if not entries:
    return None
  ranks = f"{entries[0].rank:.3g} to {entries[-1].rank:.3g}"
  title = f"Rank of the updates, sent from {ranks}, and length of the rounds"
  figure, (left, right) = style.frame(2, title)
  for field, name, colour, drawn, line in _RANKS:
    look: dict[str, Any] = {"drawstyle": drawn, "linestyle": line}
    look |= {"color": colour}
    _plot(left, entries, "step", field, label=name, **look)
  starts = [0, *(row.step for row in run.rounds)]
  rounds = [
    (row.step, row.step - start)
    for start, row in zip(starts, run.rounds, strict=False)
    if row.phase == "rounds"
  ]
  right.plot(
    *zip(*rounds, strict=True), color=COLOURS[2], drawstyle="steps-pre"
  )
  kind = f"measured, averaged update: {_identity(run)}"
  style.label(left, kind, "inner steps", "rank, mean over matrices")
  kind = f"chosen; {units.human_bytes(run.total_sent_bytes)} a replica in all"
  style.label(right, kind, "inner steps", "inner steps a round (H)")
  for ax in (left, right):
    ax.set_ylim(bottom=0)
  style.legend(figure, left, 3)
  return figure
