"""Wall times compared within one process, as paired ratios.

One machine's speed drifts by more than what is looked for, so two programs run
in turn and the median of their ratios is taken.
"""

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence

import jax
from rich.progress import track
from rich.table import Table

from experiments.benchmarks.record import keep_record

TimedProgram = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Ratio:
  """One comparison: how often slower `measured` is than `baseline`.

  Attributes:
    name: What is compared.
    measured: Runs once, and waits until it has.
    baseline: The same.
    bound: What the ratio must not exceed.
    scale: The ratio is divided by it.
  """

  name: str
  measured: TimedProgram
  baseline: TimedProgram
  bound: float
  scale: float = 1.0


def _seconds(function: TimedProgram) -> float:
  started = time.perf_counter()
  function()
  return time.perf_counter() - started


def _pair(ratio: Ratio, measured_first: bool) -> tuple[float, float]:
  """Both times; the order changes, lest a trend of the machine show."""
  if measured_first:
    measured_s = _seconds(ratio.measured)
    return measured_s, _seconds(ratio.baseline)
  baseline_s = _seconds(ratio.baseline)
  return _seconds(ratio.measured), baseline_s


def measure(ratio: Ratio, repeats: int) -> dict[str, float | bool]:
  """Runs both in turn and takes medians.

  Args:
    ratio: What is compared.
    repeats: Paired measurements.
  """
  ratio.measured()  # Compiles.
  ratio.baseline()
  pairs = [
    _pair(ratio, number % 2 == 0)
    for number in track(range(repeats), description=ratio.name)
  ]
  values = [a / b / ratio.scale for a, b in pairs]
  median = statistics.median(values)
  return {
    "median": median,
    "min": min(values),
    "max": max(values),
    "measured_s": statistics.median(a for a, _ in pairs),
    "baseline_s": statistics.median(b for _, b in pairs),
    "bound": ratio.bound,
    "is_within_bound": median <= ratio.bound,
  }


def run(
  name: str, ratios: Sequence[Ratio], workdir: pathlib.Path, repeats: int
) -> dict:
  """Measures all ratios, writes bench_NAME.json and prints a table.

  Args:
    name: Of the bench.
    ratios: What is compared.
    workdir: Where the file goes.
    repeats: Paired measurements of every ratio.
  """
  results = {ratio.name: measure(ratio, repeats) for ratio in ratios}
  record = {
    "device": jax.devices()[0].device_kind,
    "jax": jax.__version__,
    "repeats": repeats,
    "label": "measured: medians of paired ratios in one process",
    "ratios": results,
  }
  table = Table(title="Ratios of wall time, measured")
  for column in ("ratio", "median", "min", "max", "bound"):
    table.add_column(column)
  for what, row in results.items():
    cells = [f"{row[key]:.3f}" for key in ("median", "min", "max", "bound")]
    table.add_row(what, *cells)
  keep_record(workdir, name, record, table)
  return record
