"""Collects the gaps of all methods to AllReduce from the committed runs.

A *gap* is the loss of a method divided by the loss of AllReduce at the same
number of sequences a step, minus 1. `dilocox_jax.api.measured_gaps` reads the
result, `dilocox_jax/api/measured_gaps.json`. When rows have been added, this
command writes the file anew; a test fails as long as the file is out of date:

    python -c 'from experiments.sweeps import measured; measured.write()'
"""

import json
import math
import pathlib
import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from dilocox_jax.api.measured_gaps import PATH
from dilocox_jax.metrics.lines import write_json
from dilocox_jax.report.frame import standard_error
from experiments.configs import replicas
from experiments.sweeps.rows import Rows, RunRow

_ROOT = pathlib.Path(__file__).parents[2]
_MAIN = "docs/results/replicas_main.csv"
_CPU = "docs/results/replicas_cpu.csv"
_LONG = "docs/results/replicas_long.csv"
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

Losses = dict[int, float]  # By seed (nats a token).
RowsByName = Mapping[str, list[RunRow]]  # A row for each seed of a setting.


def collected() -> dict[str, Any]:
  """Computes the content of `measured_gaps.json` from the committed rows.

  Returns:
    "gaps": the gaps, sorted by method, number of replicas and name. "exponent":
    how fast AllReduce's loss falls (`_exponent`).
  """
  main = _rows(_MAIN)
  # Of this file only the method eager is collected.
  cpu = {name: runs for name, runs in _rows(_CPU).items() if "eager" in name}
  gaps = list(_gaps(main, base=main, path=_MAIN))
  gaps += _gaps(cpu, base=main, path=_CPU)
  gaps.sort(key=lambda gap: (gap["method"], gap["num_replicas"], gap["name"]))
  return {"exponent": _exponent(main), "gaps": gaps}


def write() -> None:
  """Writes `measured_gaps.json` from the committed rows."""
  write_json(PATH, collected())


def _rows(path: str) -> dict[str, list[RunRow]]:
  """Reads the finished runs of a file, by name of the setting.

  Args:
    path: CSV file, relative to the root of the repository.
  """
  rows: dict[str, list[RunRow]] = {}
  for row in Rows(_ROOT / path).runs.values():
    rows.setdefault(row.name, []).append(row)
  return rows


def _losses(rows: list[RunRow]) -> Losses:
  """Returns the losses of runs on the judge text, by seed.

  No setting is chosen by its loss on this text (`dilocox_jax.data.corpus`).
  """
  return {row.seed: row.judge_loss for row in rows}


def _gaps(
  rows: RowsByName, base: RowsByName, path: str
) -> Iterator[dict[str, Any]]:
  """Yields the gap of each setting to AllReduce, with its error and settings.

  Only seeds count that both have. The gap compares the means over seeds, and
  the error is the standard error of the gaps of single seeds.

  Args:
    rows: Runs of a file. Names that `_NAME` and `_SIZES` do not allow, and
      AllReduce, are left out.
    base: Runs of the file that has AllReduce.
    path: File of `rows`, relative to the root of the repository.
  """
  for name, runs in rows.items():
    match = _NAME.fullmatch(name)
    if not match or match["method"] == "allreduce":
      continue
    size = f"{match['count']}x{match['sequences']}"
    if size not in _SIZES:
      continue
    kind = f"{match['optimizer'] or ''}{match['other'] or ''}"
    separator = ", " if kind else " "
    base_name = _BASELINES[f"{match['method']}{kind}{separator}{size}"]
    losses = _losses(runs)
    base_losses = _losses(base[base_name])
    seeds = sorted(losses.keys() & base_losses.keys())
    mean = statistics.mean(losses[seed] for seed in seeds)
    base_mean = statistics.mean(base_losses[seed] for seed in seeds)
    seed_gaps = [losses[seed] / base_losses[seed] - 1 for seed in seeds]
    overrides = json.loads(runs[0].overrides)
    settings = {
      path: overrides[path] for path in _SETTINGS if path in overrides
    }
    yield {
      "name": name,
      "baseline": base_name,
      "method": match["method"],
      "num_replicas": int(match["count"]),
      "sequences": int(match["sequences"]),
      "steps": runs[0].total_steps,
      "seeds": len(seeds),
      "gap": round(mean / base_mean - 1, 6),
      "error": round(standard_error(seed_gaps), 6),
      "inner_rate": overrides["inner.learning_rate"],
      "settings": settings,
      "rows": path,
    }


def _exponent(main: RowsByName) -> dict[str, Any]:
  """Computes the exponent with which AllReduce's loss falls with the steps.

  The exponent e of loss ~ steps^-e follows from a short and a long run:

    e = ln(short run's loss / long run's loss) / ln(long steps / short steps)

  The losses are means over the seeds that both runs have.

  Args:
    main: Runs of the file with the short run.

  Returns:
    "value": e. "steps": short and long number of inner steps. "runs": name of
    the setting.
  """
  name = "allreduce 2x4"
  short_runs = main[name]
  long_runs = _rows(_LONG)[name]
  short_losses = _losses(short_runs)
  long_losses = _losses(long_runs)
  seeds = sorted(short_losses.keys() & long_losses.keys())
  short_mean = statistics.mean(short_losses[seed] for seed in seeds)
  long_mean = statistics.mean(long_losses[seed] for seed in seeds)
  short_steps = short_runs[0].total_steps
  long_steps = long_runs[0].total_steps
  value = math.log(short_mean / long_mean) / math.log(long_steps / short_steps)
  return {
    "value": round(value, 4),
    "steps": [short_steps, long_steps],
    "runs": name,
  }
