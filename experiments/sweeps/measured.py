"""Collects the loss of each method beside AllReduce from the committed runs.

The planner reads the result, `dilocox_jax/api/measured_gaps.json`. After new
rows this command writes the file anew, and a test says if it is old:

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
from experiments.sweeps.rows import Rows, RunRow

_ROOT = pathlib.Path(__file__).parents[2]
_MAIN = "docs/results/replicas_main.csv"
_CPU = "docs/results/replicas_cpu.csv"
_LONG = "docs/results/replicas_long.csv"
# Names of the runs of `tiny` whose gaps are collected. "4x2" is four replicas
# of two sequences each. The sizes below stand for all runs with as many
# replicas.
_NAME = re.compile(
  r"(?P<method>\w+)(?P<optimizer>, AdamW)?"
  r"(?P<other>, last rate zero, no average|, momentum of nine tenths)?"
  r",? (?P<count>\d+)x(?P<sequences>\d+)"
)
_SIZES = ("2x4", "4x4", "8x4", "16x1")
# AllReduce of 16 replicas with a sequence each has the batch of four with four.
_BASE_SIZES = {"16x1": "4x4"}
# Fields of a config that are listed with a gap. The inner rate is not among
# them, as the rate of a small model is too high for a large one.
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

Losses = dict[int, float]


def collected() -> dict[str, Any]:
  """Returns the content of `measured_gaps.json`, computed from the rows."""
  main = _rows(_MAIN)
  cpu = {name: runs for name, runs in _rows(_CPU).items() if "eager" in name}
  gaps = list(_gaps(main, main, _MAIN))
  gaps += _gaps(cpu, main, _CPU)
  gaps.sort(key=lambda gap: (gap["method"], gap["num_replicas"], gap["name"]))
  return {"exponent": _exponent(main), "gaps": gaps}


def write() -> None:
  """Writes the file that the planner reads."""
  write_json(PATH, collected())


def _rows(path: str) -> dict[str, list[RunRow]]:
  """Returns the runs of a file by name."""
  rows: dict[str, list[RunRow]] = {}
  for row in Rows(_ROOT / path).runs.values():
    rows.setdefault(row.name, []).append(row)
  return rows


def _losses(rows: list[RunRow]) -> Losses:
  """Returns the losses on the text that judges, by seed."""
  return {row.seed: row.judge_loss for row in rows}


def _gaps(
  rows: Mapping[str, list[RunRow]], base: Mapping[str, list[RunRow]], path: str
) -> Iterator[dict[str, Any]]:
  """Yields the gap of each method to AllReduce with the same sequences."""
  for name, runs in rows.items():
    match = _NAME.fullmatch(name)
    if not match or match["method"] == "allreduce":
      continue
    size = f"{match['count']}x{match['sequences']}"
    if size not in _SIZES:
      continue
    kind = f"{match['optimizer'] or ''}{match['other'] or ''}"
    between = ", " if kind else " "
    base_name = f"allreduce{kind}{between}{_BASE_SIZES.get(size, size)}"
    losses = _losses(runs)
    base_losses = _losses(base[base_name])
    seeds = sorted(losses.keys() & base_losses.keys())
    mean = statistics.mean(losses[seed] for seed in seeds)
    mean_of_base = statistics.mean(base_losses[seed] for seed in seeds)
    ratios = [losses[seed] / base_losses[seed] - 1 for seed in seeds]
    changed = json.loads(runs[0].overrides)
    yield {
      "name": name,
      "method": match["method"],
      "num_replicas": int(match["count"]),
      "sequences": int(match["sequences"]),
      "steps": runs[0].total_steps,
      "seeds": len(seeds),
      "gap": round(mean / mean_of_base - 1, 6),
      "error": round(standard_error(ratios), 6),
      "inner_rate": changed["inner.learning_rate"],
      "settings": {k: changed[k] for k in _SETTINGS if k in changed},
      "rows": path,
    }


def _exponent(main: Mapping[str, list[RunRow]]) -> dict[str, Any]:
  """Returns how AllReduce's loss falls with the number of steps.

  Over the seeds that both have: ln(loss of the short run / loss of the long
  one) over ln(steps of the long run / steps of the short one).
  """
  name = "allreduce 2x4"
  short_runs = main[name]
  long_runs = _rows(_LONG)[name]
  short_losses = _losses(short_runs)
  long_losses = _losses(long_runs)
  seeds = sorted(short_losses.keys() & long_losses.keys())
  fall = math.log(
    statistics.mean(short_losses[seed] for seed in seeds)
    / statistics.mean(long_losses[seed] for seed in seeds)
  )
  short_steps = short_runs[0].total_steps
  long_steps = long_runs[0].total_steps
  value = fall / math.log(long_steps / short_steps)
  return {
    "value": round(value, 4),
    "steps": [short_steps, long_steps],
    "runs": name,
  }
