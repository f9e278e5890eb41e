"""Times one program, or compares the times of two programs.

The speed of a machine changes over time. So two programs run in turn many
times. Their ratio is the median of the ratios of neighboring times.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable

from rich.progress import track

TimedProgram = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Ratio:
  """One comparison: how many times slower `measured` is than `baseline`.

  Attributes:
    name: Name of the comparison.
    measured: Runs a program once and waits until it has ended.
    baseline: Runs the other program in the same way.
    bound: Number that the ratio must not exceed, set beforehand.
    scale: Number by which the ratio is divided. Example: 2 if `measured` does
      the work of `baseline` twice.
  """

  name: str
  measured: TimedProgram
  baseline: TimedProgram
  bound: float
  scale: float = 1.0


def seconds(program: TimedProgram) -> float:
  """Returns how long a program runs (seconds)."""
  start = time.perf_counter()
  program()
  return time.perf_counter() - start


def measure_ratio(ratio: Ratio, repeats: int) -> dict[str, float | bool]:
  """Runs two programs in turn, and returns the median of their ratios.

  Args:
    ratio: The comparison.
    repeats: Number of paired measurements.

  Returns:
    Median, least and largest ratio, the bound and whether the median is within
    it, and the median times of both programs (seconds).
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
