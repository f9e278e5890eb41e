"""Figures of runs: loss, drift, bytes, simulated time and ranks.

Each function returns a figure, or None if a run has nothing to show in it. A
run with one replica has no drift, for example.
"""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilocox_jax.codecs.named import split_links
from dilocox_jax.report import frame, panels, style, units
from dilocox_jax.report.curves import MAX_FRONT
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.report.style import COLOURS, GREY, MARKERS, PALE

# A rank within 3 % of its cap counts as at the cap: it is a mean over
# matrices, of which small ones cannot have the full rank.
_AT_CAP = 0.97


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
_CROWD = {"color": PALE, "marker": ".", "markersize": 3, "linewidth": 0.9}
_RANKS = (
  ("rank", "sent", GREY, "steps-mid", "-"),
  ("energy_rank", "measured, by energy", COLOURS[0], "default", "-"),
  ("stable_rank", "measured, stable rank", COLOURS[1], "default", "--"),
)
_LOSS_AXIS = "loss (nats a token)"


def _mean_of(entries: Sequence[Any], field: str) -> float:
  """Returns the mean of a field's finite values; NaN if there are none."""
  found = [getattr(entry, field) for entry in entries]
  finite = [value for value in found if math.isfinite(value)]
  return math.fsum(finite) / len(finite) if finite else math.nan


def _plot(
  ax: Axes, rows: Sequence[Any], across: str, up: str, divisor=1.0, **look: Any
) -> None:
  """Draws one field of some rows against another, which is divided first."""
  x = [getattr(row, across) / divisor for row in rows]
  ax.plot(x, [getattr(row, up) for row in rows], **look)


def _identity(run: LoadedRun) -> str:
  count = run.record["num_replicas"]
  noun = "replica" if count == 1 else "replicas"
  return f"{run.record['method']}, {count} {noun}"


def _shade_warm_start(ax: Axes, run: LoadedRun, divisor: float) -> None:
  local = [index for index, r in enumerate(run.rounds) if r.phase == "rounds"]
  if local and local[0] > 0:
    end = run.rounds[local[0] - 1].tokens / divisor
    ax.axvspan(0, end, color="#F1F1F1", zorder=0, label="warm start")


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
  if run.result and math.isnan(run.result.mean_loss):  # It was not computed.
    shown = [view for view in shown if view[0] != "mean_loss"]
  for index, (field, label, line, size, width) in enumerate(shown):
    colour = COLOURS[index]
    look: dict[str, Any] = {"color": colour, "linestyle": line}
    look |= {"linewidth": width, "label": f"validation, {label}"}
    look |= {"marker": MARKERS[index], "markersize": size, "zorder": 5 - index}
    look |= {"markerfacecolor": "none" if index else colour}
    _plot(ax, run.evaluations, "tokens", field, divisor, **look)
  look = {"color": PALE, "linewidth": 1.4, "zorder": 2}
  look |= {"label": "training, mean of replicas"}
  _plot(ax, run.rounds, "tokens", "loss", divisor, **look)
  _shade_warm_start(ax, run, divisor)
  cut = style.cut_high(ax, [r.loss for r in run.rounds])
  kind = f"measured: {_identity(run)}{cut}"
  style.label(ax, kind, f"{unit}, all replicas", _LOSS_AXIS)
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
  last = [entry.cosine for entry in entries[-len(fragments) :]]
  finite = [cosine for cosine in last if math.isfinite(cosine)]
  title = "Distance between the replicas"
  if finite:
    mean = math.fsum(finite) / len(finite)
    title = f"The replicas' pseudo-gradients end with a cosine of {mean:.2f}"
  figure, axes = style.frame(2, title)
  is_crowd = len(fragments) > MAX_FRONT
  for ax, (field, label) in zip(axes, _DRIFT.items(), strict=True):
    for index, fragment in enumerate(fragments):
      look: dict[str, Any] = _CROWD
      if not is_crowd:
        look = {"color": COLOURS[index], "markersize": 3}
        look |= {"marker": MARKERS[index]}
        look |= {"linewidth": 1.4, "label": f"fragment {fragment}"}
      rows = [entry for entry in entries if entry.fragment == fragment]
      _plot(ax, rows, "step", field, **look)
    if is_crowd:
      rounds = [row.drift for row in run.rounds if row.drift]
      ax.plot(
        [_mean_of(drift, "step") for drift in rounds],
        [_mean_of(drift, field) for drift in rounds],
        color=COLOURS[0],
        marker="o",
        markersize=3.5,
        label=f"mean of {len(fragments)} fragments (grey)",
      )
    style.label(ax, f"measured: {_identity(run)}", "inner steps", label)
  if len(fragments) > 1:
    style.legend(figure, axes[0], MAX_FRONT)
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
  sums = [0, *(row.total_sent_bytes for row in rows)]
  divisor, unit = units.bytes_unit(total)
  sums = [sent / divisor for sent in sums]
  axes[0].plot(edges, sums, COLOURS[0], drawstyle="steps-post", label="rounds")
  _flush(axes[0], edges[-1], before / divisor, total / divisor)
  kind = f"derived from the plan: {_identity(run)}"
  style.label(axes[0], kind, "inner steps", f"sent since the start ({unit})")
  largest = max(flushed, *(row.sent_bytes for row in rows))
  divisor, unit = units.bytes_unit(largest)
  heights = [row.sent_bytes / divisor for row in rows]
  axes[1].stairs(heights, edges, color=COLOURS[0], fill=True, alpha=0.25)
  axes[1].stairs(heights, edges, color=COLOURS[0], linewidth=1.5)
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
  last_s = max(run.simulated_s.values())
  reached = units.human_loss(run.validation_loss)
  title = f"Loss {reached} after {units.human_time(last_s)} of simulated time"
  return panels.loss_panels(found, list(found.clocks), title, (6.4, 4.2))


def _rank_title(
  run: LoadedRun, ranks: Sequence[float], lengths: Sequence[int]
) -> str:
  """Says what became of the rank and of H, and whether a cap stopped them."""
  first, last = ranks[0], ranks[-1]
  codec = run.config.get("exchange", {}).get("codec", "float32")
  cap = dict(split_links(codec)).get("low_rank", {}).get("rank")
  rank = f"The rank went from {first:.3g} to {last:.3g}"
  if math.isclose(first, last, rel_tol=1 - _AT_CAP):
    rank = f"The rank stayed at {last:.3g}"
    if cap and min(ranks) >= _AT_CAP * cap:
      rank = f"The rank stayed at its cap of {cap}"
  if not lengths:
    return rank
  if min(lengths) == max(lengths):
    return f"{rank}, H at {lengths[0]}"
  return f"{rank}, H from {lengths[0]} to {lengths[-1]}"


def rank_figure(run: LoadedRun) -> Figure | None:
  """Draws ranks of the averaged updates and H; None without low rank."""
  drift = [entry for row in run.rounds for entry in row.drift]
  entries = [entry for entry in drift if math.isfinite(entry.rank)]
  if not entries:
    return None
  starts = [0, *(row.step for row in run.rounds)]
  rounds = [
    (row.step, row.step - start)
    for start, row in zip(starts, run.rounds, strict=False)
    if row.phase == "rounds"
  ]
  lengths = [length for _, length in rounds]
  # The last round of a run may be cut short, which is no choice of H.
  whole = lengths[:-1] if len(lengths) > 1 else lengths
  title = _rank_title(run, [entry.rank for entry in entries], whole)
  figure, (left, right) = style.frame(2, title)
  for field, label, colour, drawn, line in _RANKS:
    look: dict[str, Any] = {"color": colour, "drawstyle": drawn}
    look["linestyle"] = line
    _plot(left, entries, "step", field, label=label, **look)
  ends = [step for step, _ in rounds]
  right.plot(ends, lengths, color=COLOURS[2], drawstyle="steps-pre")
  kind = f"measured, averaged update of {run.record['method']}"
  style.label(left, kind, "inner steps", "rank, mean over matrices")
  kind = f"chosen; {units.human_bytes(run.total_sent_bytes)} a replica in all"
  style.label(right, kind, "inner steps", "inner steps a round (H)")
  for ax in (left, right):
    ax.set_ylim(bottom=0)
  style.legend(figure, left, 3)
  return figure
