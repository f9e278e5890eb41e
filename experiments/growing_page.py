"""Prints the schedules that `experiments.simulate --methods=growing` found.

A schedule says how many data-parallel steps the run begins with, how many inner
steps its rounds have, and after how many steps their length doubles.
"""

import textwrap
from collections.abc import Sequence

from rich.console import Console

from dilocox_jax.api.growing_plans import GrowingPlan
from dilocox_jax.report import units
from dilocox_jax.report.tables import terminal_table

_COLUMNS = ("rounds", "start", "time", "in steps", "sent")
_NOTE = (
  "All values are simulated or derived. Rounds: inner steps of the first and "
  "the last rounds, and after how many steps they double. Start: data-parallel "
  "steps. The simulator does not know which of them trains best: "
  "docs/results/predictions.md has what was measured."
)


def report(plans: Sequence[GrowingPlan]) -> None:
  """Prints a table of schedules with their simulated times and bytes.

  Args:
    plans: First the run with rounds of one length, then the other schedules.
  """
  title = f"{plans[0].config.sync.method}: rounds that take no more time"
  table = terminal_table(_COLUMNS, map(_cells, plans), title=title)
  Console().print(table)
  print(textwrap.fill(_NOTE, 80))
  if len(plans) == 1:
    print("\nNo other schedule takes as little time.")


def _cells(plan: GrowingPlan) -> list[str]:
  """Returns the cells of a schedule's row in the table."""
  sync = plan.config.sync
  rounds = f"{sync.named.schedule.interval_label}"
  if sync.steps_per_doubling:
    rounds += f", doubling every {sync.steps_per_doubling:,}"
  return [
    rounds,
    f"{sync.warm_start_steps:,}",
    units.human_time(plan.total_s),
    units.human_share(plan.utilization),
    units.human_bytes(plan.sent_bytes),
  ]
