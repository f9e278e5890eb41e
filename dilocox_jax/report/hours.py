"""Loss against the hours that a run would have taken on some cluster."""

import math

from matplotlib.figure import Figure

from dilocox_jax.report import style, units
from dilocox_jax.report.run import Run

_UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


def simulated_hours(run: Run) -> Figure | None:
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
