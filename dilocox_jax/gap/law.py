"""The constants of the law of the gap, with their sources.

The law: M replicas that take H inner steps in a round lose some *doublings* of
AllReduce's batch,

  D = (a log2 M - b) (H / H0)^p f.

The slope a and the offset b belong to a line that was fitted to runs with H0
inner steps in a round. The power p says how D grows with H. The factor f
belongs to the method, and is 1 for DiLoCo. If AllReduce's loss falls by a share
s when its batch doubles, the gap is (1 - s)^-D - 1.

What a method loses more than DiLoCo, by its codec or its delay, need not shrink
with s. `expected.expected_gap` says what is done about this.

The constants are in `law.json`. `python -m experiments.fit_gaps --write` writes
the file from the committed runs, and keeps the lines that come from elsewhere.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from dilocox_jax.checks import json_file

PATH = pathlib.Path(__file__).with_name("law.json")


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A number and the range in which it is expected.

  Attributes:
    value: The number.
    low: Lower end of its range.
    high: Upper end of its range.
  """

  value: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class Line:
  """A line of the doublings lost in the logarithm of M.

  Attributes:
    name: The runs behind the line, in a few words.
    parameters: Number of parameters of their model; 0: several models.
    steps: Number of inner steps of a run.
    sync_interval: H0, inner steps of a round.
    doublings: "last": each doubling of the batch counts as much as the last
      one, from B / 2 to B. "curve": each counts what AllReduce gains from it,
      as far as AllReduce was trained with smaller batches.
    slope: a, doublings lost for each doubling of M.
    slope_error: Standard error of a.
    offset: b, in doublings.
    offset_error: Standard error of b.
    correlation: Correlation of the errors of a and b.
    kind: "fitted" from rows of this repository, "derived" from a few of its
      gaps, or "recalled" from an earlier study whose code is lost. The errors
      of lines that are not fitted are assumed.
    source: Where the runs, or the line, are found.
  """

  name: str
  parameters: int
  steps: int
  sync_interval: int
  doublings: str
  slope: float
  slope_error: float
  offset: float
  offset_error: float
  correlation: float
  kind: str
  source: str


@dataclasses.dataclass(frozen=True)
class Law:
  """The constants of the law.

  Attributes:
    lines: The lines.
    interval_power: p, the power of H.
    interval_range: Smallest and largest H of the runs behind p.
    most_replicas: Largest number of replicas of the runs behind the lines.
    length_power: Power of the number of steps by which the lower end of the
      range falls in runs that are longer than those behind all lines.
    factors: f of each method whose gap was measured, by its name.
    unmeasured_factor: f of any other method.
    diloco_log_gap: Logarithm of one plus the gap of DiLoCo in the runs behind
      the factors. What a method lost more than DiLoCo there is f - 1 times
      this.
    seed_share: Standard error of s from one seed, as a share of s.
    seed_most: Largest such error, in units of s.
    size_gain: s by the size of the model (`gain.gain_of_size`): "parameters",
      "value", "power", "smallest" and "largest" size of the runs behind it,
      "most", which is the largest s that it gives, and "factor", by which the
      truth may be lower or higher.
  """

  lines: tuple[Line, ...]
  interval_power: Estimate
  interval_range: tuple[int, int]
  most_replicas: int
  length_power: float
  factors: Mapping[str, Estimate]
  unmeasured_factor: Estimate
  diloco_log_gap: float
  seed_share: float
  seed_most: float
  size_gain: Mapping[str, float]

  @property
  def longest_steps(self) -> int:
    """Largest number of inner steps of the runs behind the lines."""
    return max(line.steps for line in self.lines)


@functools.cache
def law() -> Law:
  """Returns the constants in `law.json`."""
  return law_of(json_file(PATH))


def law_of(content: Mapping[str, Any]) -> Law:
  """Returns the constants in the content of a file like `law.json`.

  Args:
    content: The content of the file.
  """
  smallest, largest = content["interval_power"]["tried"]
  seeds = content["seed_error"]
  sizes = content["gain_by_size"]
  return Law(
    lines=tuple(Line(**line) for line in content["lines"]),
    interval_power=_estimate(content["interval_power"]),
    interval_range=(smallest, largest),
    most_replicas=content["most_replicas"],
    length_power=content["length_power"]["value"],
    factors={
      method: _estimate(factor) for method, factor in content["factors"].items()
    },
    unmeasured_factor=_estimate(content["unmeasured_factor"]),
    diloco_log_gap=content["diloco_log_gap"]["value"],
    seed_share=seeds["share"],
    seed_most=seeds["most"],
    size_gain={
      name: value for name, value in sizes.items() if name != "source"
    },
  )


def _estimate(values: Mapping[str, Any]) -> Estimate:
  """Returns the number and the range of an object of the file."""
  return Estimate(values["value"], values["low"], values["high"])
