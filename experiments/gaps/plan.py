"""How many runs a list of settings has, and how long they take."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from dilocox_jax.plan.model.shapes import flops_per_token
from dilocox_jax.report.tables import markdown_table
from experiments.gaps import design, tuning
from experiments.gaps.design import Group
from experiments.gaps.rows import GapRow, by_setting
from experiments.gaps.settings import Rates, Run, Setting

# Operations a second of one process, before any run has told them.
_ASSUMED_FLOPS = {"cpu": 15e9, "gpu": 10e12}


class Amount(NamedTuple):
  """How much training some settings need.

  Attributes:
    settings: Number of settings.
    done: Finished runs.
    left: Runs that are probably left.
    seconds: Time of one process for those that are left.
  """

  settings: int
  done: int
  left: int
  seconds: float


@functools.cache
def run_flops(setting: Setting) -> float:
  """Returns the operations of the model in one run (`flops_per_token`)."""
  config = setting.config(Run(Rates(inner=1.0, outer=1.0), seed=0))
  length = setting.sequence_length
  return flops_per_token(config.model.shape, length) * setting.tokens


def amount(
  settings: Sequence[Setting], rows: Sequence[GapRow], name: str
) -> Amount:
  """Returns how much training some settings need.

  Args:
    settings: The settings.
    rows: Finished runs, also those of other settings.
    name: Name of the list, which tells the speed before there are rows.
  """
  found = by_setting(rows)
  speed = measured_flops(rows) or _ASSUMED_FLOPS[name]
  num_done = 0
  num_left = 0
  seconds = 0.0
  for setting in settings:
    results = found.get(setting, [])
    missing = tuning.missing_runs(setting, results)
    left = len(missing.runs) + missing.num_later
    num_done += len(results)
    num_left += left
    seconds += left * run_flops(setting) / speed
  return Amount(len(settings), num_done, num_left, seconds)


def measured_flops(rows: Sequence[GapRow]) -> float | None:
  """Returns the operations a second of one process; None without rows."""
  seconds = sum(row.seconds for row in rows)
  if not seconds:
    return None
  return sum(run_flops(row.setting) for row in rows) / seconds


def table(groups: Sequence[Group], rows: Sequence[GapRow], name: str) -> str:
  """Returns a table of the groups in Markdown.

  Args:
    groups: Groups of settings.
    rows: Finished runs.
    name: Name of the list, "cpu" or "gpu".
  """
  everything = [setting for group in groups for setting in group.settings]
  named = [(group.name, list(group.settings)) for group in groups]
  lines = []
  for title, settings in [*named, ("all", everything)]:
    needed = amount(settings, rows, name)
    hours = f"{needed.seconds / 3600:.2f}"
    lines.append([title, needed.settings, needed.done, needed.left, hours])
  header = ["group", "settings", "runs done", "runs left", "hours left"]
  speed = measured_flops(rows) or _ASSUMED_FLOPS[name]
  kind = "measured" if rows else "assumed"
  note = (
    f"Hours of one process at {speed / 1e9:.1f} GFLOP/s ({kind}). Held out: "
    f"{design.HELD_OUT_SIZE} parameters and {design.HELD_OUT_REPLICAS} "
    "replicas."
  )
  return "\n".join([*markdown_table(header, lines), "", note])
