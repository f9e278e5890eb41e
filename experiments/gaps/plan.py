"""Estimates how many runs settings still need, and how long these runs take."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from dilocox_jax.plan.model.shapes import flops_per_token
from dilocox_jax.report.tables import markdown_table
from experiments.gaps import design, tuning
from experiments.gaps.design import Group
from experiments.gaps.rows import GapRow, by_setting
from experiments.gaps.settings import Rates, Run, Setting

# Speed of one process (FLOP/s) that counts while no run is finished, by name of
# the list of settings.
_ASSUMED_FLOPS_PER_S = {"cpu": 15e9, "gpu": 10e12, "texts": 15e9}


class TrainingNeeded(NamedTuple):
  """How many runs of some settings are done and left, and the time of the rest.

  Attributes:
    num_settings: Number of settings.
    num_done: Number of finished runs.
    num_left: Estimated number of runs that are left.
    left_s: Estimated time in which one process trains them (seconds).
  """

  num_settings: int
  num_done: int
  num_left: int
  left_s: float


class _Speed(NamedTuple):
  """Speed of one process.

  Attributes:
    flops_per_s: Operations a second (FLOP/s).
    kind: "measured" or "assumed".
  """

  flops_per_s: float
  kind: str


@functools.cache
def run_operations(setting: Setting) -> float:
  """Returns the estimated operations of one run (FLOP)."""
  config = setting.config(Run(Rates(inner=1.0, outer=1.0), seed=0))
  token_flops = flops_per_token(config.model.shape, setting.sequence_length)
  return token_flops * setting.tokens


def training_needed(
  settings: Sequence[Setting], rows: Sequence[GapRow], list_name: str
) -> TrainingNeeded:
  """Estimates how much training some settings still need.

  Args:
    settings: Settings whose runs are counted.
    rows: Finished runs of any settings. All of them count for the mean speed.
    list_name: Name of the list of settings (`design.DESIGNS`). It decides the
      assumed speed if `rows` is empty.
  """
  rows_by_setting = by_setting(rows)
  flops_per_s = _speed(rows, list_name).flops_per_s
  num_done = 0
  num_left = 0
  left_s = 0.0
  for setting in settings:
    results = rows_by_setting.get(setting, [])
    missing = tuning.missing_runs(setting, results)
    num_missing = len(missing.runs) + missing.num_later
    num_done += len(results)
    num_left += num_missing
    left_s += num_missing * run_operations(setting) / flops_per_s
  return TrainingNeeded(
    num_settings=len(settings),
    num_done=num_done,
    num_left=num_left,
    left_s=left_s,
  )


def _speed(rows: Sequence[GapRow], list_name: str) -> _Speed:
  """Returns the mean speed of finished runs; without runs an assumed one."""
  seconds = sum(row.seconds for row in rows)
  if not seconds:
    return _Speed(_ASSUMED_FLOPS_PER_S[list_name], kind="assumed")
  operations = sum(run_operations(row.setting) for row in rows)
  return _Speed(operations / seconds, kind="measured")


def table(
  groups: Sequence[Group], rows: Sequence[GapRow], list_name: str
) -> str:
  """Returns a Markdown table with the training that each group needs.

  The last line is for all groups together. A note below says at which speed the
  hours are estimated.
  """
  all_settings = [setting for group in groups for setting in group.settings]
  settings_by_title = [(group.name, group.settings) for group in groups]
  lines = []
  for title, settings in [*settings_by_title, ("all", all_settings)]:
    needed = training_needed(settings, rows, list_name)
    lines.append(
      [
        title,
        needed.num_settings,
        needed.num_done,
        needed.num_left,
        f"{needed.left_s / 3600:.2f}",
      ]
    )
  header = ["group", "settings", "runs done", "runs left", "hours left"]
  speed = _speed(rows, list_name)
  note = (
    f"Hours of one process at {speed.flops_per_s / 1e9:.1f} GFLOP/s"
    f" ({speed.kind}). Held out: {design.HELD_OUT_SIZE} parameters and"
    f" {design.HELD_OUT_REPLICAS} replicas."
  )
  return "\n".join([*markdown_table(header, lines), "", note])
