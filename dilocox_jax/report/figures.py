"""Figures of runs: loss, drift, bytes, simulated time and ranks.

Each function returns a figure, or None if a run has nothing to show in it. A
run with one replica has no drift, for example.
"""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dilocox_jax.metrics import DriftRow
from dilocox_jax.report import style, units
from dilocox_jax.report.curves import MAX_FRONT
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.report.style import COLOURS, GREY, MARKERS, PALE

# A rank within 3 % of its cap counts as at the cap: it is a mean over
# matrices, of which small ones cannot have the full rank.
_AT_CAP = 0.97


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
  tokens = [e.tokens / divisor for e in run.evaluations]
  shown = [("outer", "outer parameters", "-")]
  if run.record["num_replicas"] > 1:
    shown += [("mean", "replicas' mean", "--"), ("replica", "replica 0", ":")]
  for index, (field, label, line_style) in enumerate(shown):
    # The three losses are often equal. Larger hollow markers under smaller
    # ones and the order of drawing keep all of them visible.
    ax.plot(
      tokens,
      [getattr(e, f"{field}_loss") for e in run.evaluations],
      line_style,
      color=COLOURS[index],
      marker=MARKERS[index],
      markersize=(4, 6, 8)[index],
      markerfacecolor=COLOURS[0] if index == 0 else "none",
      linewidth=(1.4, 1.8, 2.2)[index],
      label=f"validation, {label}",
      zorder=5 - index,
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
  cut = style.cut_high(ax, [r.loss for r in run.rounds])
  ax.set_xlabel(f"{unit}, all replicas")
  ax.set_ylabel("loss (nats a token)")
  style.caption(ax, f"measured: {_identity(run)}{cut}")
  style.legend(figure, ax, 2)
  return figure


def _drift_title(entries: Sequence[DriftRow], num_fragments: int) -> str:
  last = [e.cosine for e in entries[-num_fragments:] if math.isfinite(e.cosine)]
  if not last:
    return "Distance between the replicas"
  mean = math.fsum(last) / len(last)
  return f"The replicas' pseudo-gradients end with a cosine of {mean:.2f}"


def drift_figure(run: LoadedRun) -> Figure | None:
  """Draws pairwise cosine and disagreement by step, one line per fragment.

  With more than six fragments all lines are grey, and their mean over each
  round is in front.
  """
  entries = [entry for row in run.rounds for entry in row.drift]
  if not entries:
    return None
  fragments = sorted({entry.fragment for entry in entries})
  figure, axes = style.frame(2, _drift_title(entries, len(fragments)))
  panels = (
    ("cosine", "mean pairwise cosine (1 = agree)"),
    ("disagreement", "norm of disagreement"),
  )
  is_crowd = len(fragments) > MAX_FRONT
  for ax, (field, label) in zip(axes, panels, strict=True):
    for index, fragment in enumerate(fragments):
      rows = [entry for entry in entries if entry.fragment == fragment]
      ax.plot(
        [entry.step for entry in rows],
        [getattr(entry, field) for entry in rows],
        color=PALE if is_crowd else COLOURS[index],
        marker="." if is_crowd else "o",
        markersize=3,
        linewidth=0.9 if is_crowd else 1.4,
        label=f"_fragment {fragment}" if is_crowd else f"fragment {fragment}",
      )
    if is_crowd:
      rounds = [row.drift for row in run.rounds if row.drift]
      ax.plot(
        [max(entry.step for entry in drift) for drift in rounds],
        [
          math.fsum(getattr(e, field) for e in drift) / len(drift)
          for drift in rounds
        ],
        color=COLOURS[0],
        marker="o",
        markersize=3.5,
        label=f"mean of {len(fragments)} fragments (grey)",
      )
    ax.set_xlabel("inner steps")
    ax.set_ylabel(label)
    style.caption(ax, f"measured: {_identity(run)}")
  if len(fragments) > 1:
    style.legend(figure, axes[0], MAX_FRONT)
  return figure


def bytes_figure(run: LoadedRun) -> Figure | None:
  """Draws the bytes that one replica sent: in all, and in each round.

  The flush takes no inner steps, so it is a vertical line at the end of both
  panels.
  """
  if not any(row.sent_bytes for row in run.rounds):
    return None
  total = units.human_bytes(run.total_sent_bytes)
  flushed = run.total_sent_bytes - run.rounds[-1].total_sent_bytes
  title = f"One replica sent {total} in {run.steps:,} steps"
  if flushed:
    title += f", {units.human_bytes(flushed)} of it in the flush"
  figure, axes = style.frame(2, title)
  rows = run.rounds
  steps = [row.step for row in rows]
  before = rows[-1].total_sent_bytes
  divisor, unit = units.bytes_unit(run.total_sent_bytes)
  axes[0].plot(
    [0, *steps],
    [0, *(row.total_sent_bytes / divisor for row in rows)],
    color=COLOURS[0],
    drawstyle="steps-post",
    label="rounds",
  )
  _flush(axes[0], steps[-1], before / divisor, run.total_sent_bytes / divisor)
  axes[0].set_ylabel(f"sent since the start ({unit})")
  largest = max(flushed, *(row.sent_bytes for row in rows))
  divisor, unit = units.bytes_unit(largest)
  heights = [row.sent_bytes / divisor for row in rows]
  edges = [0, *steps]
  axes[1].stairs(heights, edges, color=COLOURS[0], fill=True, alpha=0.25)
  axes[1].stairs(heights, edges, color=COLOURS[0], linewidth=1.5)
  _flush(axes[1], steps[-1], 0.0, flushed / divisor)
  axes[1].set_ylabel(f"sent in the round ({unit})")
  axes[1].set_ylim(0, 1.08 * largest / divisor)
  for ax in axes:
    ax.set_xlabel("inner steps")
    style.caption(ax, f"derived from the plan: {_identity(run)}")
  style.legend(figure, axes[0], 2)
  return figure


def _flush(ax: Axes, step: int, low: float, high: float) -> None:
  if high > low:
    look = {"color": COLOURS[1], "marker": "o", "markersize": 4}
    ax.plot([step, step], [low, high], linewidth=2.5, label="flush", **look)


def time_figure(run: LoadedRun) -> Figure | None:
  """Draws validation loss against simulated time; None without a clock."""
  at_s = run.simulated_s
  shown = [e for e in run.evaluations if e.step in at_s]
  if not shown:
    return None
  last_s = max(at_s.values())
  reached = units.human_loss(shown[-1].outer_loss)
  title = f"Loss {reached} after {units.human_time(last_s)} of simulated time"
  figure, (ax,) = style.frame(1, title)
  divisor, unit = units.time_unit(last_s)
  ax.plot(
    [at_s[e.step] / divisor for e in shown],
    [e.outer_loss for e in shown],
    color=COLOURS[0],
    marker=MARKERS[0],
    label="validation, outer parameters",
  )
  ax.set_xlabel(f"simulated time on the given cluster ({unit})")
  ax.set_ylabel("loss (nats a token)")
  style.caption(ax, "loss measured, time derived (simulated)")
  style.legend(figure, ax, 1)
  return figure


def _rank_title(
  run: LoadedRun, ranks: Sequence[float], lengths: Sequence[int]
) -> str:
  """Says what became of the rank and of H, and whether a cap stopped them."""
  first, last = ranks[0], ranks[-1]
  cap = run.config.get("codec", {}).get("rank")
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
    if row.phase == "local"
  ]
  lengths = [length for _, length in rounds]
  # The last round of a run may be cut short, which is no choice of H.
  whole = lengths[:-1] if len(lengths) > 1 else lengths
  ranks = [entry.rank for entry in entries]
  figure, axes = style.frame(2, _rank_title(run, ranks, whole))
  steps = [entry.step for entry in entries]
  for field, label, colour, line_style in (
    ("rank", "sent", GREY, "steps-mid"),
    ("energy_rank", "measured, by energy", COLOURS[0], "default"),
    ("stable_rank", "measured, stable rank", COLOURS[1], "default"),
  ):
    values = [getattr(entry, field) for entry in entries]
    axes[0].plot(steps, values, color=colour, drawstyle=line_style, label=label)
  axes[0].set_ylabel("rank, mean over matrices")
  axes[1].plot(
    [step for step, _ in rounds],
    lengths,
    color=COLOURS[2],
    drawstyle="steps-pre",
  )
  axes[1].set_ylabel("inner steps a round (H)")
  for ax in axes:
    ax.set_ylim(bottom=0)
    ax.set_xlabel("inner steps")
  style.caption(axes[0], f"measured, averaged update of {run.record['method']}")
  sent = units.human_bytes(run.total_sent_bytes)
  style.caption(axes[1], f"chosen; {sent} a replica in all")
  style.legend(figure, axes[0], 3)
  return figure
