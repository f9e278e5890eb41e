"""The rank of a run's updates: what was measured, and what was sent."""

import math

from matplotlib.figure import Figure

from dilocox_jax.report import units
from dilocox_jax.report.run import Run
from dilocox_jax.report.style import (
  COLOURS,
  GREY,
  caption,
  frame,
  legend,
)


def ranks(run: Run) -> Figure | None:
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
  for field, label, colour, style in (
    ("rank", "sent", GREY, "steps-mid"),
    ("energy_rank", "measured, by energy", COLOURS[0], "default"),
    ("stable_rank", "measured, stable rank", COLOURS[1], "default"),
  ):
    values = [getattr(entry, field) for entry in entries]
    axes[0].plot(steps, values, color=colour, drawstyle=style, label=label)
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
