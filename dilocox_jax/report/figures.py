"""Figures of runs, drawn on Figure objects so that no global state is touched.

Each function returns a figure, or None where a run has nothing to show, such as
drift with one replica. Colours are Okabe and Ito's, told apart with impaired
colour vision; many fragments share a scale of even steps in lightness instead.
The legend stands outside the axes, the title says what is seen, and the line
above each panel says whether its numbers are measured or derived.
"""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from dilocox_jax.metrics import Drift
from dilocox_jax.report import units
from dilocox_jax.report.run import Run

DPI = 150
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_MARKERS = "osD^vP"
_GREY, _PALE = "#555555", "#B8B8B8"


def _palette(count: int) -> list[Any]:
  if count <= len(_COLOURS):
    return list(_COLOURS[:count])
  scale = matplotlib.colormaps["viridis"]
  return [scale(0.92 * index / (count - 1)) for index in range(count)]


def _figure(panels: int, title: str) -> tuple[Figure, list[Axes]]:
  figure = Figure(
    figsize=(6.4 if panels == 1 else 9.6, 4.2), dpi=DPI, layout="constrained"
  )
  figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)  # pyright: ignore
  figure.suptitle(title, x=0.02, ha="left", fontsize=12, fontweight="bold")
  axes = list(figure.subplots(1, panels, squeeze=False)[0])
  for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(True, color="#E6E6E6", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=9, color=_GREY)
  return figure, axes


def _caption(ax: Axes, text: str) -> None:
  ax.set_title(text, loc="left", fontsize=9, color=_GREY)


def _legend(figure: Figure, ax: Axes, columns: int) -> None:
  handles, labels = ax.get_legend_handles_labels()
  figure.legend(
    handles,
    labels,
    loc="outside lower center",
    ncols=min(columns, len(labels)),
    frameon=False,
    fontsize=9,
  )


def _identity(run: Run) -> str:
  count = run.record["num_replicas"]
  noun = "replica" if count == 1 else "replicas"
  return f"{run.record['method']}, {count} {noun}"


def _cut_early_loss(ax: Axes, losses: Sequence[float]) -> str:
  """Keeps a few high losses at the start from flattening all the rest."""
  finite = sorted(loss for loss in losses if math.isfinite(loss))
  if not finite:
    return ""
  low, high = finite[0], finite[int(0.9 * (len(finite) - 1))]
  if finite[-1] - low <= 3 * (high - low) or high == low:
    return ""
  ax.set_ylim(low - 0.1 * (high - low), low + 1.5 * (high - low))
  return "; the first losses are above the axis"


def _shade_warm_start(ax: Axes, run: Run, divisor: float) -> None:
  local = [index for index, r in enumerate(run.rounds) if r.phase == "local"]
  if local and local[0] > 0:
    end = run.rounds[local[0] - 1].tokens / divisor
    ax.axvspan(0, end, color="#F1F1F1", zorder=0, label="warm start")


def loss(run: Run) -> Figure | None:
  """Training and validation loss against tokens."""
  if not run.rounds and not run.evaluations:
    return None
  title = "Training loss so far"
  if run.result:
    reached = units.human_loss(run.validation_loss)
    seen = units.human_tokens(run.result.tokens)
    title = f"Validation loss {reached} after {seen}"
  figure, (ax,) = _figure(1, title)
  divisor, unit = units.tokens_axis(run.tokens)
  tokens = [e.tokens / divisor for e in run.evaluations]
  shown = [("outer", "outer parameters", "-")]
  if run.record["num_replicas"] > 1:
    shown += [("mean", "replicas' mean", "--"), ("replica", "replica 0", ":")]
  for index, (field, label, style) in enumerate(shown):
    values = [getattr(e, f"{field}_loss") for e in run.evaluations]
    ax.plot(
      tokens,
      values,
      style,
      color=_COLOURS[index],
      marker=_MARKERS[index],
      markersize=(4, 5.5, 7)[index],
      markerfacecolor=_COLOURS[0] if index == 0 else "none",
      linewidth=1.6,
      label=f"validation, {label}",
      zorder=5 - index,  # Where the three agree, the outer parameters show.
    )
  ax.plot(
    [r.tokens / divisor for r in run.rounds],
    [r.loss for r in run.rounds],
    color=_PALE,
    linewidth=1.4,
    label="training, mean of replicas",
    zorder=2,
  )
  _shade_warm_start(ax, run, divisor)
  cut = _cut_early_loss(ax, [r.loss for r in run.rounds])
  ax.set_xlabel(f"{unit}, all replicas")
  ax.set_ylabel("loss (nats a token)")
  _caption(ax, f"measured: {_identity(run)}{cut}")
  _legend(figure, ax, 2)
  return figure


def _drift_title(entries: Sequence[Drift], num_fragments: int) -> str:
  last = [e.cosine for e in entries[-num_fragments:] if math.isfinite(e.cosine)]
  if not last:
    return "How far the replicas are apart"
  mean = math.fsum(last) / len(last)
  return f"The replicas' pseudo-gradients end with a cosine of {mean:.2f}"


def drift(run: Run) -> Figure | None:
  """Pairwise cosine and disagreement by step, one line a fragment."""
  entries = [entry for row in run.rounds for entry in row.drift]
  if not entries:
    return None
  fragments = sorted({entry.fragment for entry in entries})
  figure, axes = _figure(2, _drift_title(entries, len(fragments)))
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
    _caption(ax, f"measured: {_identity(run)}")
  if len(fragments) > 1:
    _legend(figure, axes[0], 6)
  return figure


def sent(run: Run) -> Figure | None:
  """Bytes on the wire of one replica: in all, and in each round."""
  if not any(row.sent_bytes for row in run.rounds):
    return None
  total = units.human_bytes(run.total_sent_bytes)
  figure, axes = _figure(2, f"One replica sent {total} in {run.steps:,} steps")
  rows = run.rounds
  steps = [row.step for row in rows]
  totals = [0, *(row.total_sent_bytes for row in rows), run.total_sent_bytes]
  divisor, unit = units.bytes_axis(run.total_sent_bytes)
  axes[0].plot(
    [0, *steps, run.steps],
    [value / divisor for value in totals],
    color=_COLOURS[0],
    drawstyle="steps-post",
  )
  axes[0].set_ylabel(f"sent since the start ({unit})")
  largest = max(row.sent_bytes for row in rows)
  divisor, unit = units.bytes_axis(largest)
  heights = [row.sent_bytes / divisor for row in rows]
  edges = [0, *steps]
  axes[1].stairs(heights, edges, color=_COLOURS[0], fill=True, alpha=0.25)
  axes[1].stairs(heights, edges, color=_COLOURS[0], linewidth=1.5)
  axes[1].set_ylabel(f"sent in the round ({unit})")
  axes[1].set_ylim(0, 1.08 * largest / divisor)
  for ax in axes:
    ax.set_xlabel("inner steps")
    _caption(ax, f"derived from the plan: {_identity(run)}")
  return figure


def _comparison_title(runs: Sequence[Run], labels: Sequence[str]) -> str:
  named = list(zip(runs, labels, strict=True))
  ended = [pair for pair in named if math.isfinite(pair[0].validation_loss)]
  if not ended:
    return "No validation loss yet"
  run, label = min(ended, key=lambda pair: pair[0].validation_loss)
  title = f"Lowest loss: {label}, {units.human_loss(run.validation_loss)}"
  run, label = min(ended, key=lambda pair: pair[0].total_sent_bytes)
  sent_least = units.human_bytes(run.total_sent_bytes)
  return f"{title}. Fewest bytes: {label}, {sent_least}"


def _bytes_axis(ax: Axes, sent_bytes: Sequence[int]) -> None:
  ax.set_xlabel("sent by one replica")
  if not sent_bytes:
    ax.text(0.5, 0.5, "nothing to show", ha="center", transform=ax.transAxes)
    return
  decades = math.log10(max(sent_bytes) / min(sent_bytes))
  if decades > 0.7:
    ax.set_xscale("log")
    ax.set_xlabel("sent by one replica (log scale)")
    subs = (1, 2, 5) if decades < 1.6 else (1, 3) if decades < 2.5 else (1,)
    ax.xaxis.set_major_locator(LogLocator(subs=subs))
    ax.xaxis.set_minor_formatter(NullFormatter())
  # After the scale, which brings its own formatter.
  ax.xaxis.set_major_formatter(lambda value, _: units.bytes_tick(value))


def comparison(runs: Sequence[Run], labels: Sequence[str]) -> Figure:
  """Validation loss of several runs against tokens and against bytes."""
  figure, axes = _figure(2, _comparison_title(runs, labels))
  rows = [row for run in runs for row in run.evaluations]
  divisor, unit = units.tokens_axis(
    max((row.tokens for row in rows), default=0)
  )
  for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
    style = {
      "color": _palette(len(runs))[index],
      "marker": _MARKERS[index % len(_MARKERS)],
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
  cut = _cut_early_loss(axes[0], [row.outer_loss for row in rows])
  axes[1].set_ylim(axes[0].get_ylim())
  axes[0].set_xlabel(f"{unit}, all replicas")
  drawn = [row for row in rows if math.isfinite(row.outer_loss)]
  _bytes_axis(axes[1], [n for r in drawn if (n := r.total_sent_bytes) > 0])
  for ax in axes:
    ax.set_ylabel("validation loss (nats a token)")
  _caption(axes[0], f"measured{cut}")
  _caption(axes[1], "loss measured, bytes derived from the plan")
  _legend(figure, axes[0], 4)
  return figure
