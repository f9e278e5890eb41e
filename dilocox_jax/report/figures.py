"""Figures of runs: what was learned, how far apart, and at how many bytes.

Each function returns a figure, or None where a run has nothing to show, such as
drift with one replica. Many fragments share a scale of even steps in lightness
instead of the colours that tell few things apart.
"""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilocox_jax.metrics import DriftRow
from dilocox_jax.report import style, units
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.report.style import (
  COLOURS,
  GREY,
  MARKERS,
  PALE,
  bytes_axis,
  caption,
  cut_high,
  frame,
  legend,
)


def _palette(count: int) -> list[Any]:
  if count <= len(COLOURS):
    return list(COLOURS[:count])
  scale = matplotlib.colormaps["viridis"]
  return [scale(0.92 * index / (count - 1)) for index in range(count)]


def _identity(run: LoadedRun) -> str:
  count = run.record["num_replicas"]
  noun = "replica" if count == 1 else "replicas"
  return f"{run.record['method']}, {count} {noun}"


def _shade_warm_start(ax: Axes, run: LoadedRun, divisor: float) -> None:
  local = [index for index, r in enumerate(run.rounds) if r.phase == "local"]
  if local and local[0] > 0:
    end = run.rounds[local[0] - 1].tokens / divisor
    ax.axvspan(0, end, color="#F1F1F1", zorder=0, label="warm start")


def loss_figure(run: LoadedRun) -> Figure | None:
  """Training and validation loss against tokens."""
  if not run.rounds and not run.evaluations:
    return None
  title = "Training loss so far"
  if run.result:
    reached = units.human_loss(run.validation_loss)
    seen = units.human_tokens(run.result.tokens)
    title = f"Validation loss {reached} after {seen}"
  figure, (ax,) = frame(1, title)
  divisor, unit = units.tokens_unit(run.tokens)
  tokens = [e.tokens / divisor for e in run.evaluations]
  shown = [("outer", "outer parameters", "-")]
  if run.record["num_replicas"] > 1:
    shown += [("mean", "replicas' mean", "--"), ("replica", "replica 0", ":")]
  for index, (field, label, line_style) in enumerate(shown):
    values = [getattr(e, f"{field}_loss") for e in run.evaluations]
    ax.plot(
      tokens,
      values,
      line_style,
      color=COLOURS[index],
      marker=MARKERS[index],
      markersize=(4, 5.5, 7)[index],
      markerfacecolor=COLOURS[0] if index == 0 else "none",
      linewidth=1.6,
      label=f"validation, {label}",
      zorder=5 - index,  # Where the three agree, the outer parameters show.
    )
  ax.plot(
    [r.tokens / divisor for r in run.rounds],
    [r.loss for r in run.rounds],
    color=PALE,
    linewidth=1.4,
    label="training, mean of replicas",
    zorder=2,
  )
  _shade_warm_start(ax, run, divisor)
  cut = cut_high(ax, [r.loss for r in run.rounds])
  ax.set_xlabel(f"{unit}, all replicas")
  ax.set_ylabel("loss (nats a token)")
  caption(ax, f"measured: {_identity(run)}{cut}")
  legend(figure, ax, 2)
  return figure


def _drift_title(entries: Sequence[DriftRow], num_fragments: int) -> str:
  last = [e.cosine for e in entries[-num_fragments:] if math.isfinite(e.cosine)]
  if not last:
    return "How far the replicas are apart"
  mean = math.fsum(last) / len(last)
  return f"The replicas' pseudo-gradients end with a cosine of {mean:.2f}"


def drift_figure(run: LoadedRun) -> Figure | None:
  """Pairwise cosine and disagreement by step, one line a fragment."""
  entries = [entry for row in run.rounds for entry in row.drift]
  if not entries:
    return None
  fragments = sorted({entry.fragment for entry in entries})
  figure, axes = frame(2, _drift_title(entries, len(fragments)))
  panels = (
    ("cosine", "mean pairwise cosine (1 = agree)"),
    ("disagreement", "norm of disagreement"),
  )
  colours, every = _palette(len(fragments)), -(-len(fragments) // 12)
  for ax, (field, label) in zip(axes, panels, strict=True):
    for colour, fragment in zip(colours, fragments, strict=True):
      mine = [entry for entry in entries if entry.fragment == fragment]
      ax.plot(
        [entry.step for entry in mine],
        [getattr(entry, field) for entry in mine],
        color=colour,
        marker="o",
        markersize=3,
        linewidth=1.4,
        # A dozen names are enough to read a scale of colours.
        label=f"fragment {fragment}" if fragment % every == 0 else None,
      )
    ax.set_xlabel("inner steps")
    ax.set_ylabel(label)
    caption(ax, f"measured: {_identity(run)}")
  if len(fragments) > 1:
    legend(figure, axes[0], 6)
  return figure


def bytes_figure(run: LoadedRun) -> Figure | None:
  """Bytes on the wire of one replica: in all, and in each round."""
  if not any(row.sent_bytes for row in run.rounds):
    return None
  total = units.human_bytes(run.total_sent_bytes)
  figure, axes = frame(2, f"One replica sent {total} in {run.steps:,} steps")
  rows = run.rounds
  steps = [row.step for row in rows]
  totals = [0, *(row.total_sent_bytes for row in rows), run.total_sent_bytes]
  divisor, unit = units.bytes_unit(run.total_sent_bytes)
  axes[0].plot(
    [0, *steps, run.steps],
    [value / divisor for value in totals],
    color=COLOURS[0],
    drawstyle="steps-post",
  )
  axes[0].set_ylabel(f"sent since the start ({unit})")
  largest = max(row.sent_bytes for row in rows)
  divisor, unit = units.bytes_unit(largest)
  heights = [row.sent_bytes / divisor for row in rows]
  edges = [0, *steps]
  axes[1].stairs(heights, edges, color=COLOURS[0], fill=True, alpha=0.25)
  axes[1].stairs(heights, edges, color=COLOURS[0], linewidth=1.5)
  axes[1].set_ylabel(f"sent in the round ({unit})")
  axes[1].set_ylim(0, 1.08 * largest / divisor)
  for ax in axes:
    ax.set_xlabel("inner steps")
    caption(ax, f"derived from the plan: {_identity(run)}")
  return figure


def _comparison_title(runs: Sequence[LoadedRun], labels: Sequence[str]) -> str:
  named = list(zip(runs, labels, strict=True))
  ended = [pair for pair in named if math.isfinite(pair[0].validation_loss)]
  if not ended:
    return "No validation loss yet"
  run, label = min(ended, key=lambda pair: pair[0].validation_loss)
  title = f"Lowest loss: {label}, {units.human_loss(run.validation_loss)}"
  run, label = min(ended, key=lambda pair: pair[0].total_sent_bytes)
  sent_least = units.human_bytes(run.total_sent_bytes)
  return f"{title}. Fewest bytes: {label}, {sent_least}"


def comparison_figure(
  runs: Sequence[LoadedRun], labels: Sequence[str]
) -> Figure:
  """Validation loss of several runs against tokens and against bytes."""
  figure, axes = frame(2, _comparison_title(runs, labels))
  rows = [row for run in runs for row in run.evaluations]
  divisor, unit = units.tokens_unit(
    max((row.tokens for row in rows), default=0)
  )
  for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
    style = {
      "color": _palette(len(runs))[index],
      "marker": MARKERS[index % len(MARKERS)],
      "markersize": 4,
      "linewidth": 1.6,
      "label": label,
    }
    for ax, field, scale in (
      (axes[0], "tokens", divisor),
      (axes[1], "total_sent_bytes", 1),
    ):
      # A logarithm has no place for zero bytes.
      seen = [row for row in run.evaluations if getattr(row, field) > 0]
      x = [getattr(row, field) / scale for row in seen]
      ax.plot(x, [row.outer_loss for row in seen], **style)
  cut = cut_high(axes[0], [row.outer_loss for row in rows])
  axes[1].set_ylim(axes[0].get_ylim())
  axes[0].set_xlabel(f"{unit}, all replicas")
  drawn = [row for row in rows if math.isfinite(row.outer_loss)]
  bytes_axis(axes[1], [n for r in drawn if (n := r.total_sent_bytes) > 0])
  for ax in axes:
    ax.set_ylabel("validation loss (nats a token)")
  caption(axes[0], f"measured{cut}")
  caption(axes[1], "loss measured, bytes derived from the plan")
  legend(figure, axes[0], 4)
  return figure


_UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


def time_figure(run: LoadedRun) -> Figure | None:
  """Validation loss against simulated time; None for a run without a clock."""
  at = {
    timing.step: timing.simulated_s
    for timing in run.timings
    if timing.event == "evaluation" and math.isfinite(timing.simulated_s)
  }
  shown = [e for e in run.evaluations if e.step in at]
  if not shown:
    return None
  last_s = max(at.values())
  divisor, unit = next(
    (pair for pair in _UNITS if last_s >= pair[0]), _UNITS[-1]
  )
  reached = units.human_loss(shown[-1].outer_loss)
  figure, (ax,) = style.frame(
    1, f"Loss {reached} after {last_s / divisor:.3g} simulated {unit}"
  )
  ax.plot(
    [at[e.step] / divisor for e in shown],
    [e.outer_loss for e in shown],
    color=style.COLOURS[0],
    marker=style.MARKERS[0],
    label="validation, outer parameters",
  )
  ax.set_xlabel(f"simulated time on the given cluster ({unit})")
  ax.set_ylabel("loss (nats a token)")
  style.caption(ax, "loss measured, time derived (simulated)")
  style.legend(figure, ax, 1)
  return figure


def rank_figure(run: LoadedRun) -> Figure | None:
  """Rank measured and sent, and H, by step; None without low rank."""
  entries = [
    entry
    for row in run.rounds
    for entry in row.drift
    if math.isfinite(entry.rank)
  ]
  if not entries:
    return None
  first, last = entries[0].rank, entries[-1].rank
  title = f"The rank stayed at {last:.3g}"
  if first != last:
    title = f"The rank went from {first:.3g} to {last:.3g}"
  figure, axes = frame(2, title)
  steps = [entry.step for entry in entries]
  for field, label, colour, line_style in (
    ("rank", "sent", GREY, "steps-mid"),
    ("energy_rank", "measured, by energy", COLOURS[0], "default"),
    ("stable_rank", "measured, stable rank", COLOURS[1], "default"),
  ):
    values = [getattr(entry, field) for entry in entries]
    axes[0].plot(steps, values, color=colour, drawstyle=line_style, label=label)
  axes[0].set_ylim(bottom=0)
  axes[0].set_ylabel("rank, mean over matrices")
  rounds = [row for row in run.rounds if row.phase == "local"]
  starts = [0, *(row.step for row in run.rounds)]
  lengths = [
    row.step - start
    for start, row in zip(starts, run.rounds, strict=False)
    if row.phase == "local"
  ]
  axes[1].plot(
    [row.step for row in rounds],
    lengths,
    color=COLOURS[2],
    drawstyle="steps-pre",
  )
  axes[1].set_ylim(bottom=0)
  axes[1].set_ylabel("inner steps a round")
  for ax in axes:
    ax.set_xlabel("inner steps")
  caption(axes[0], f"measured, averaged update of {run.record['method']}")
  sent = units.human_bytes(run.total_sent_bytes)
  caption(axes[1], f"chosen; {sent} a replica in all")
  legend(figure, axes[0], 3)
  return figure
