"""Finds s, the share by which AllReduce's loss falls when its batch doubles.

The batch doubles from B / 2 to B sequences a step, at the same number of steps.
If the loss falls from 2.00 to 1.96, s is 0.02. `gain_of_losses` computes s from
two such losses. `gain_of_size` guesses s from the size of the model, and
`extended_gain` extends it from smaller models to a larger one.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dilocox_jax.checks import require, within_limits
from dilocox_jax.gap.law import Estimate, law

# Two standard errors on either side contain 95 % of what may come.
NUM_ERRORS = 2.0


class SizeGain(NamedTuple):
  """The size of a model, and how much it gains from a larger batch.

  Attributes:
    parameters: Number of parameters of the model.
    gain: s of the model.
  """

  parameters: int
  gain: Estimate


def gain_of_losses(
  losses: Sequence[float], error: float | None = None
) -> Estimate:
  """Returns s, the share by which AllReduce's loss falls if its batch doubles.

  The range is two standard errors on either side, cut at 0 and at 0.99. An s
  above 0.99 becomes 0.99.

  Args:
    losses: Two losses of AllReduce after equally many steps: the first with B /
      2 sequences a step, the second with B. Their unit is nats per token, or
      another unit in which a perfect model has 0.
    error: Standard error of s. None: the error with one seed (`seed_error`).

  Raises:
    ValueError: If there are not two positive losses, or if the loss with B is
      not the lower one.
  """
  require(
    len(losses) == 2,
    f"losses has {len(losses)} numbers: give two, the loss with half of the"
    " batch and the loss with the whole batch",
  )
  half, full = losses
  for name, loss in (("with B / 2", half), ("with B", full)):
    within_limits(f"the loss {name}", loss, above=0, below=math.inf)
  require(
    full < half,
    f"the loss with the whole batch, {full:g}, is not below the loss with half"
    f" of it, {half:g}: give the loss with half of the batch first; if they are"
    " in order, tune the rate at both batches",
  )
  gain = 1 - full / half
  return with_error(gain, seed_error(gain) if error is None else error)


def seed_error(gain: float) -> float:
  """Returns the standard error of s (`gain`) if one seed measured it."""
  return min(law().seed_share * gain, law().seed_most)


def with_error(gain: float, error: float) -> Estimate:
  """Returns s (`gain`) with a range of plus and minus 2 `error`.

  The range is cut at 0 and at 0.99, and s itself at 0.99.
  """
  return Estimate(
    value=min(gain, 0.99),
    low=max(gain - NUM_ERRORS * error, 0.0),
    high=min(gain + NUM_ERRORS * error, 0.99),
  )


def gain_of_size(parameters: float) -> Estimate:
  """Guesses s from the size of a model alone.

  s is taken as proportional to 1 / (third root of the number of parameters),
  and is at most 10 %. The range goes from half of s to twice s.

  Args:
    parameters: Number of parameters of the model.

  Raises:
    ValueError: If `parameters` is not above 0.

  Source: gaps of models of 35 million to 2.4 billion parameters, arXiv
  2503.09799, table 4.
  """
  within_limits("parameters", parameters, above=0, below=math.inf)
  line = law().size_gain
  ratio = parameters / line["parameters"]
  gain = min(line["value"] * ratio ** -line["power"], line["most"])
  factor = line["factor"]
  return Estimate(value=gain, low=gain / factor, high=gain * factor)


def extended_gain(points: Sequence[SizeGain], parameters: float) -> Estimate:
  """Extrapolates s from smaller models to a larger model.

  A power of the number of parameters is fitted to all smaller models, and s of
  the largest of them is scaled by this power. The range also covers an s that
  stays the same, and one that falls as 1 / (third root of the number of
  parameters).

  Args:
    points: s of at least two models of different sizes.
    parameters: Number of parameters of the larger model.

  Raises:
    ValueError: If there are fewer than two sizes, or an s is not between 0 and
      1.
  """
  sizes = sorted({point.parameters for point in points})
  require(
    len(sizes) >= 2,
    f"s of {len(sizes)} sizes cannot be extended: it takes at least two",
  )
  for point in points:
    within_limits(
      f"s of {point.parameters:,} parameters",
      point.gain.value,
      above=0,
      below=1,
    )
  power, _ = np.polyfit(
    np.log([point.parameters for point in points]),
    np.log([point.gain.value for point in points]),
    deg=1,
  )
  largest = max(points, key=lambda point: point.parameters)
  ratio = parameters / largest.parameters
  # By how much s changes: with the fitted power, not at all, and as published.
  growths = [ratio**p for p in (float(power), 0.0, -law().size_gain["power"])]
  value = largest.gain.value * growths[0]
  return Estimate(
    value=min(value, 0.99),
    low=largest.gain.low * min(growths),
    high=min(largest.gain.high * max(growths), 0.99),
  )
