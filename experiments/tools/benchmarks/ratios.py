"""Wall times compared within one process, as paired ratios.

The speed of one machine drifts by more than the differences that matter. So
two programs run in turn, and the median of the ratios of their times is taken.
"""

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dilocox_jax.metrics.lines import write_json
from dilocox_jax.report.text_tables import terminal_table

TimedProgram = Callable[[], object]
_SPREAD = ("median", "min", "max", "bound")


@dataclasses.dataclass(frozen=True)
class Ratio:
  """One comparison: how many times slower `measured` is than `baseline`.

  Attributes:
    name: What is compared.
    measured: Runs a program once and waits until it has ended.
    baseline: Does so with the other program.
    bound: What the ratio must not exceed.
    scale: Number by which the ratio is divided.
  """

  name: str
  measured: TimedProgram
  baseline: TimedProgram
  bound: float
  scale: float = 1.0


def _seconds(program: TimedProgram) -> float:
  started = time.perf_counter()
  program()
  return time.perf_counter() - started


def measure_ratio(ratio: Ratio, repeats: int) -> dict[str, float | bool]:
  """Runs both programs in turn and takes medians.

  Args:
    ratio: What is compared.
    repeats: Paired measurements.
  """
  ratio.measured()  # Compiles.
  ratio.baseline()
  pairs = []
  for number in track(range(repeats), description=ratio.name):
    # A machine that gets slower while a pair runs would favour the first, so
    # every other pair begins with the baseline.
    if number % 2:
      baseline_s = _seconds(ratio.baseline)
      pairs.append((_seconds(ratio.measured), baseline_s))
    else:
      pairs.append((_seconds(ratio.measured), _seconds(ratio.baseline)))
  values = [a / b / ratio.scale for a, b in pairs]
  median = statistics.median(values)
  return {
    "median": median,
    "min": min(values),
    "max": max(values),
    "bound": ratio.bound,
    "is_within_bound": median <= ratio.bound,
    "measured_s": statistics.median(a for a, _ in pairs),
    "baseline_s": statistics.median(b for _, b in pairs),
  }


def run_ratios(
  name: str, ratios: Sequence[Ratio], workdir: pathlib.Path, repeats: int
) -> None:
  """Measures all ratios, writes bench_NAME.json and prints a table.

  Args:
    name: Name of the benchmark.
    ratios: What is compared.
    workdir: Directory of the file.
    repeats: Paired measurements of every ratio.
  """
  results = {ratio.name: measure_ratio(ratio, repeats) for ratio in ratios}
  record = {
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "repeats": repeats,
    "label": "measured: medians of paired ratios in one process",
    "ratios": results,
  }
  cells = [
    (what, *(f"{row[key]:.3f}" for key in _SPREAD))
    for what, row in results.items()
  ]
  table = terminal_table(
    ("measured", *_SPREAD), cells, title="Ratios of wall time, measured"
  )
  keep_record(workdir, name, record, table)


def keep_record(
  workdir: pathlib.Path, name: str, record: Mapping[str, Any], table: Table
) -> None:
  """Writes bench_NAME.json, shows the table and says where the file is."""
  path = workdir / f"bench_{name}.json"
  write_json(path, record)
  Console().print(table)
  print(f"results: {path}")
