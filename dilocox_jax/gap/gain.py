"""s, the share by which AllReduce's loss falls when its batch doubles.

s is measured from B / 2 to B sequences in a step, at the same number of steps,
where B counts the sequences of all replicas together. It is the only number of
a text and a model that the law of the gap needs.
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
  """s of a model.

  Attributes:
    parameters: Number of parameters of the model.
    gain: s.
  """

  parameters: int
  gain: Estimate


def gain_of_losses(
  losses: Sequence[float], error: float | None = None
) -> Estimate:
  """Returns s from two losses of AllReduce.

  Args:
    losses: Loss with B / 2 sequences in a step and loss with B sequences, after
      the same number of steps (nats a token, or any other unit of which zero
      means a perfect model).
    error: Standard error of s. None: that of one seed, as it was measured in
      small models.

  Returns:
    s as an `Estimate`, with two standard errors on either side, at least 0.

  Raises:
    ValueError: If there are not two losses, if a loss is not a positive number,
      or if the loss with B is not the lower one.
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
  """Returns the standard error of an s that comes from one seed.

  Args:
    gain: s.
  """
  return min(law().seed_share * gain, law().seed_most)


def with_error(gain: float, error: float) -> Estimate:
  """Returns s with a range of two standard errors, at least 0 and below 1.

  Args:
    gain: s.
    error: Its standard error.
  """
  return Estimate(
    value=gain,
    low=max(gain - NUM_ERRORS * error, 0.0),
    high=min(gain + NUM_ERRORS * error, 0.99),
  )


def gain_of_size(parameters: float) -> Estimate:
  """Returns s by the size of a model, for want of losses: an extrapolation.

  s falls as the third root of the number of parameters. This line was fitted to
  published gaps of models of 35 million to 2.4 billion parameters, each at its
  own best batch (arXiv 2503.09799, table 4). Smaller models have an s of at
  most 10 % (measured with 0.86 million parameters). s depends on the batch and
  on the text as well, which the line does not know.

  Args:
    parameters: Number of parameters of the model.

  Returns:
    s. The truth may be half or twice as large.
  """
  within_limits("parameters", parameters, above=0, below=math.inf)
  line = law().size_gain
  ratio = parameters / line["parameters"]
  gain = min(line["value"] * ratio ** -line["power"], line["most"])
  factor = line["factor"]
  return Estimate(value=gain, low=gain / factor, high=gain * factor)


def extended_gain(points: Sequence[SizeGain], parameters: float) -> Estimate:
  """Extends s from smaller models to a larger model.

  s is taken to be a power of the number of parameters, fitted to the points.
  The range of the result covers three powers: the fitted one, none (s of the
  largest point), and the third root at which s falls in published runs. It
  covers the error of s at the largest point as well.

  Args:
    points: s of at least two models of different sizes.
    parameters: Number of parameters of the larger model.

  Raises:
    ValueError: If there are fewer than two sizes, or an s is not positive.
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
  growths = [ratio**p for p in (float(power), 0.0, -law().size_gain["power"])]
  value = largest.gain.value * growths[0]
  return Estimate(
    value=min(value, 0.99),
    low=largest.gain.low * min(growths),
    high=min(largest.gain.high * max(growths), 0.99),
  )
