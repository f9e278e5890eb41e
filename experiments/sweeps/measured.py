"""Collects measured gaps of methods to AllReduce from the committed runs.

A *gap* is the loss of a method divided by the loss of AllReduce at the same
number of sequences a step, minus 1. The committed runs are in
docs/results/runs.csv. After rows have been added there, this command writes
`dilocox_jax/api/measured_gaps.json` anew (a test compares the two files):

    python -c 'from experiments.sweeps import measured; measured.write()'
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from dilocox_jax.api.measured_gaps import PATH
from dilocox_jax.metrics.lines import write_json
from experiments.configs import replicas
from experiments.sweeps.columns import overrides_of
from experiments.sweeps.finished import Rows
from experiments.sweeps.rows import RunRow
from experiments.sweeps.tables import COMMITTED

_MAIN = "replicas_main"
_CPU = "replicas_cpu"
_LONG = "replicas_long"
# Names of the runs of `tiny` whose gaps are collected, such as "diloco 4x4" or
# "overlap_loco, AdamW, 2x4". "2x4" means two replicas of four sequences each.
_NAME = re.compile(
  r"(?P<method>\w+)(?P<optimizer>, AdamW)?"
  r"(?P<other>, momentum of nine tenths)?"
  r",? (?P<count>\d+)x(?P<sequences>\d+)"
)
# Only these sizes are collected, one for each number of replicas.
_SIZES = ("2x4", "4x4", "8x4", "16x1")
# Baseline of each setting of the main sweep, by name of the setting.
_BASELINES = replicas.SWEEPS["main"]["baselines"]
# Fields of a config that are listed as settings of a gap. The inner rate is
# listed apart from them, because the rate of a small model is too high for a
# large one.
_SETTINGS = (
  "sync.sync_interval",
  "sync.num_fragments",
  "exchange.codec",
  "exchange.feedback",
  "inner.optimizer",
  "inner.momentum",
  "outer.learning_rate",
  "outer.momentum",
  "outer.average_power",
)

RowsBySetting = Mapping[str, list[RunRow]]  # A row for each seed.


def collected() -> dict[str, Any]:
  """Computes the content of `measured_gaps.json` from docs/results/runs.csv.

  Returns:
    "gaps": a list with a dict for each setting of a method. It has the gap,
    the standard error of the gap, and the setting's name and fields. The list
    is sorted by method, number of replicas and name.
    "exponent": a dict that says how fast AllReduce's loss falls with the number
    of steps.
  """
  main = _rows(_MAIN)
  # Of this study only the method eager is collected.
  cpu = {name: runs for name, runs in _rows(_CPU).items() if "eager" in name}
  gaps = list(_gaps(main, base=main, study=_MAIN))
  gaps += _gaps(cpu, base=main, study=_CPU)
  gaps.sort(key=lambda gap: (gap["method"], gap["num_replicas"], gap["name"]))
  return {"exponent": _exponent(main), "gaps": gaps}


def write() -> None:
  """Writes `measured_gaps.json` from the runs in docs/results/runs.csv."""
  write_json(PATH, collected())


def _rows(study: str) -> dict[str, list[RunRow]]:
  """Returns the committed runs of a study (a sweep), by name of the setting."""
  rows: dict[str, list[RunRow]] = {}
  for row in Rows(COMMITTED, study).runs.values():
    rows.setdefault(row.setting, []).append(row)
  return rows


def _paired_losses(rows: list[RunRow], base: list[RunRow]) -> pd.DataFrame:
  """Returns the judge losses of the seeds that two settings share.

  They are losses on held-out files by which no setting is chosen. The runs
  `rows` become the column "own", and the runs `base` the column "base".
  """
  columns = {
    name: pd.Series({row.seed: row.judge_loss for row in runs})
    for name, runs in (("own", rows), ("base", base))
  }
  return pd.DataFrame(columns).dropna()


def _gaps(
  rows: RowsBySetting, base: RowsBySetting, study: str
) -> Iterator[dict[str, Any]]:
  """Yields the gap of each setting to AllReduce, with its error and settings.

  The gap is the loss of the setting in `rows` divided by AllReduce's in `base`,
  minus 1. The losses are means over the seeds that both have. The error is the
  standard error of the gaps of single seeds. AllReduce, and settings whose
  names `_NAME` or `_SIZES` do not allow, are left out.
  """
  for name, runs in rows.items():
    match = _NAME.fullmatch(name)
    if not match or match["method"] == "allreduce":
      continue
    size = f"{match['count']}x{match['sequences']}"
    if size not in _SIZES:
      continue
    # The name is put together again in the form of the table of baselines, e.g.
    # "diloco 4x4" or "diloco, AdamW, 2x4".
    kind = f"{match['optimizer'] or ''}{match['other'] or ''}"
    separator = ", " if kind else " "
    base_name = _BASELINES[f"{match['method']}{kind}{separator}{size}"]
    paired = _paired_losses(runs, base[base_name])
    means = paired.mean()
    seed_gaps = (paired["own"] / paired["base"] - 1).to_frame("gap")
    overrides = overrides_of(runs[0].config)
    settings = {
      path: overrides[path] for path in _SETTINGS if path in overrides
    }
    yield {
      "name": name,
      "baseline": base_name,
      "method": match["method"],
      "num_replicas": int(match["count"]),
      "sequences": int(match["sequences"]),
      "steps": runs[0].steps,
      "seeds": len(paired),
      "gap": round(float(means["own"] / means["base"] - 1), 6),
      "error": round(float(seed_gaps.sem()["gap"]), 6),
      "inner_rate": overrides["inner.learning_rate"],
      "settings": settings,
      "study": study,
    }


def _exponent(main: RowsBySetting) -> dict[str, Any]:
  """Computes e in loss ~ steps^-e, which says how fast AllReduce's loss falls.

  It follows from the mean losses of a short and a long run:

    e = ln(short run's loss / long run's loss) / ln(long steps / short steps)

  Returns:
    "value": e. "steps": short and long number of inner steps. "runs": name of
    the setting.
  """
  name = "allreduce 2x4"
  short_runs = main[name]
  long_runs = _rows(_LONG)[name]
  means = _paired_losses(short_runs, long_runs).mean()
  short_steps = short_runs[0].steps
  long_steps = long_runs[0].steps
  # The short run's loss divided by the long run's.
  fall = float(means["own"] / means["base"])
  value = math.log(fall) / math.log(long_steps / short_steps)
  return {
    "value": round(value, 4),
    "steps": [short_steps, long_steps],
    "runs": name,
  }
