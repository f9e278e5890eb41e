"""The constants of a law: how far M replicas' loss ends above AllReduce's.

The gap is the loss of M replicas divided by that of AllReduce, minus 1. The
law: M replicas that take H inner steps in a round train as AllReduce does with
a batch that is halved D times,

  D = (a log2 M - b) (H / H0)^p f.

The slope a and the offset b belong to a line that follows from runs with H0
inner steps in a round. The power p says how D grows with H. The factor f
belongs to the method, and is 1 for DiLoCo. If AllReduce's loss falls by a share
s when its batch doubles, the gap is (1 - s)^-D - 1.

For example, a = 0.75, b = 0.25, M = 4, H = H0 and f = 1 give D = 1.25. With
s = 0.02 the gap is 0.98^-1.25 - 1 = 0.026.

The constants are in `law.json`, which `python -m experiments.fit_gaps --write`
writes.
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
  """A line D = a log2(M) - b, which follows from runs with M replicas.

  D is how many times AllReduce's batch would have to be halved to raise its
  loss to that of the replicas.

  Attributes:
    name: The runs behind the line, in a few words.
    parameters: Number of parameters of their model; if they have two models, a
      number between those of the two.
    steps: Number of inner steps of a run.
    sync_interval: H0, inner steps of a round.
    doublings: How gaps were turned into D. "last": by the share by which
      AllReduce's loss fell when its batch doubled for the last time, up to the
      batch of the runs; earlier doublings are taken to have the same share.
      "curve": D is read from AllReduce's losses with several batches.
    slope: a, how much D grows if M doubles.
    slope_error: Standard error of a.
    offset: b, in the unit of D.
    offset_error: Standard error of b.
    correlation: Correlation of the errors of a and b.
    kind: "fitted" to runs of this repository, "derived" from a few of its gaps,
      or "recalled" from an earlier study. The last two have assumed errors.
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
  """The constants of the law of the gap.

  The law is D = (a log2 M - b) (H / H0)^p f for M replicas with H inner steps
  in a round, and gap = (1 - s)^-D - 1. Here s is the share by which AllReduce's
  loss falls when its batch doubles.

  Attributes:
    lines: Lines with a, b and H0. Two lines may follow from the same runs, if
      their gaps were turned into D in two ways (`Line.doublings`).
    interval_power: p, the power of H.
    interval_range: Smallest and largest H of the runs to which p was fitted.
    most_replicas: Largest number of replicas in the runs behind the lines.
    length_power: Exponent for long runs. If a run is n > 1 times as long as the
      longest run behind the lines, a positive lower end of D is multiplied by
      n^length_power.
    factors: f of each method whose gap was measured, by its name.
    unmeasured_factor: f of any other method.
    diloco_log_gap: log(1 + gap) of DiLoCo in the runs behind the factors.
    seed_share: Standard error of an s from one seed, as a share of s.
    seed_most: Largest standard error of an s from one seed.
    size_gain: Constants of `gain.gain_of_size`. For a model of N parameters it
      guesses s = value (N / parameters)^-power, at most "most". The true s may
      be "factor" times lower or higher. "smallest" and "largest" are the sizes
      of the models behind the guess.
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
    """Number of inner steps of the longest run that one of `lines` fits."""
    return max(line.steps for line in self.lines)


@functools.cache
def law() -> Law:
  """Returns the constants of the law of the gap, read from `law.json`."""
  return law_of(json_file(PATH))


def law_of(content: Mapping[str, Any]) -> Law:
  """Builds a `Law` from the parsed content of a file like `law.json`."""
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
  """Returns an `Estimate` of the keys "value", "low" and "high" of `values`."""
  return Estimate(values["value"], values["low"], values["high"])
