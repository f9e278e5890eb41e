"""Measures the time of one program, or compares the times of two programs.

Two programs run in turn many times, because the speed of a machine changes. The
result is the median of the ratios of neighboring times.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable

from rich.progress import track

TimedProgram = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Ratio:
  """Two programs to compare: how many times longer does the first one take?

  Attributes:
    name: Name of the comparison.
    measured: Function that runs the first program once, and waits for its end.
    baseline: Function that runs the second program once, and waits for its end.
    bound: Number that the ratio must not exceed; set before the measurement.
    scale: Number by which the ratio is divided. Example: 2 if `measured` does
      twice the work of `baseline`.
  """

  name: str
  measured: TimedProgram
  baseline: TimedProgram
  bound: float
  scale: float = 1.0


def seconds(program: TimedProgram) -> float:
  """Runs a program once, and returns how long it took (seconds)."""
  start = time.perf_counter()
  program()
  return time.perf_counter() - start


def measure_ratio(ratio: Ratio, repeats: int) -> dict[str, float | bool]:
  """Runs two programs in turn, and computes the median of their ratios.

  Returns:
    Values by name: "median", "min" and "max" of the ratios; "bound", and
    "is_within_bound" (whether the median does not exceed the bound);
    "measured_s" and "baseline_s", the median time of each program (seconds).
  """
  ratio.measured()  # Compiles.
  ratio.baseline()
  measured_times_s = []
  baseline_times_s = []
  for number in track(range(repeats), description=ratio.name):
    # A machine that gets slower while a pair runs would favor the first, so
    # every other pair begins with the baseline.
    if number % 2:
      baseline_times_s.append(seconds(ratio.baseline))
      measured_times_s.append(seconds(ratio.measured))
    else:
      measured_times_s.append(seconds(ratio.measured))
      baseline_times_s.append(seconds(ratio.baseline))
  ratios = [
    measured_s / baseline_s / ratio.scale
    for measured_s, baseline_s in zip(
      measured_times_s, baseline_times_s, strict=True
    )
  ]
  median = statistics.median(ratios)
  return {
    "median": median,
    "min": min(ratios),
    "max": max(ratios),
    "bound": ratio.bound,
    "is_within_bound": median <= ratio.bound,
    "measured_s": statistics.median(measured_times_s),
    "baseline_s": statistics.median(baseline_times_s),
  }
