"""Predicts the gap of M replicas: how far their loss ends above AllReduce's."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from dilocox_jax.checks import of_type, require, within_limits
from dilocox_jax.gap.gain import NUM_ERRORS, gain_of_losses
from dilocox_jax.gap.law import Estimate, Law, Line, law


@dataclasses.dataclass(frozen=True)
class ExpectedGap:
  """The expected gap of M replicas, and the numbers that it follows from.

  A gap is the loss of the replicas divided by that of AllReduce, minus 1: 0.02
  is a loss that is 2 % higher.

  Attributes:
    gap: The expected gap.
    low: Lower end of its range.
    high: Upper end of its range.
    doublings: D. By the law (`gap.law`), AllReduce ends at the loss of the
      replicas if its batch is halved D times.
    gain: s, the share by which AllReduce's loss falls if its batch doubles.
    notes: Sentences that say how the prediction goes beyond the measured runs.
  """

  gap: float
  low: float
  high: float
  doublings: Estimate
  gain: Estimate
  notes: tuple[str, ...] = ()


def expected_gap(
  losses: Sequence[float] | None = None,
  *,
  num_replicas: int,
  sync_interval: int = 16,
  method: str = "diloco",
  steps: int | None = None,
  gain: float | Estimate | None = None,
) -> ExpectedGap:
  """Predicts how far the loss of M replicas ends above that of AllReduce.

  AllReduce trains with B sequences a step, and all replicas together also train
  with B sequences a step. Both take equally many steps, with their best
  learning rates. The gap follows from s, the share by which AllReduce's loss
  falls if its batch doubles from B / 2 to B. The law for this was fitted to
  small models (26 thousand to 0.86 million parameters). Fits to different runs
  disagree, so the range is wide.

  The excess of a method's gap over DiLoCo's gap was measured in a small model.
  In larger models this excess may shrink in proportion to s, or stay as it is.
  The result lies midway between these two cases, and its range covers both
  cases.

  Args:
    losses: Two losses of AllReduce: the first with B / 2 sequences a step, the
      second with B. Both runs have equally many steps, and each run has its
      best learning rate.
    num_replicas: M, at least 2.
    sync_interval: H, inner steps of a round.
    method: Name of a method with rounds, e.g. "diloco". A method whose gap was
      not measured gets a wider range.
    steps: Number of inner steps of the run. None: the run is not longer than
      the longest run to which the law was fitted.
    gain: s, in place of `losses`. A number counts as exact; an `Estimate` has a
      range.

  Raises:
    ValueError: If an argument is wrong, or if neither or both of `losses` and
      `gain` are given.

  Source: docs/results/predictions.md.
  """
  share = _gain(losses, gain)
  lost = doublings_lost(
    num_replicas=num_replicas,
    sync_interval=sync_interval,
    method=method,
    steps=steps,
  )
  diloco_lost = doublings_lost(
    num_replicas=num_replicas, sync_interval=sync_interval, steps=steps
  )
  # The two cases: the method's excess shrinks with s, or it stays as it is.
  log_gap = _between(
    _log_gap(lost, share), _with_excess(_log_gap(diloco_lost, share), method)
  )
  return ExpectedGap(
    gap=math.expm1(log_gap.value),
    low=math.expm1(log_gap.low),
    high=math.expm1(log_gap.high),
    doublings=lost,
    gain=share,
    notes=_notes(law(), num_replicas, sync_interval, method, steps),
  )


def _gain(
  losses: Sequence[float] | None, gain: float | Estimate | None
) -> Estimate:
  """Returns s (the gain of a doubled batch) from `losses`, or else from `gain`.

  Raises:
    ValueError: If neither or both are given, or a value is wrong.
  """
  require(
    (losses is None) != (gain is None),
    "give either losses, two losses of AllReduce, or gain, the share by which"
    " its loss falls when its batch doubles",
  )
  if losses is not None:
    return gain_of_losses(losses)
  if isinstance(gain, Estimate):
    for name, share in vars(gain).items():
      within_limits(f"gain.{name}", share, at_least=0, below=1)
    return gain
  within_limits("gain", gain, at_least=0, below=1)
  exact = of_type("gain", gain, float)
  return Estimate(exact, exact, exact)


def doublings_lost(
  *,
  num_replicas: int,
  sync_interval: int,
  method: str = "diloco",
  steps: int | None = None,
) -> Estimate:
  """Returns D: M replicas train as AllReduce with a batch halved D times.

  The law (`gap.law`) has several lines D = a log2(M) - b.
  The value is a mean over the lines whose field `doublings` is "last". Each
  size of a model counts equally in this mean. The range covers all lines with
  two standard errors, and the errors of the law's other constants.

  Args:
    num_replicas: M, at least 2.
    sync_interval: H, inner steps of a round.
    method: Name of a method with rounds.
    steps: Number of inner steps of the run. For a run that is longer than all
      runs behind the lines, a lower end above 0 is reduced. None: the run is
      not longer.

  Raises:
    ValueError: If an argument is wrong.
  """
  within_limits("num_replicas", num_replicas, at_least=2, below=math.inf)
  within_limits("sync_interval", sync_interval, at_least=1, below=math.inf)
  if steps is not None:
    within_limits("steps", steps, at_least=1, below=math.inf)
  constants = law()
  factor = constants.factors.get(method, constants.unmeasured_factor)
  power = constants.interval_power
  by_size: dict[int, list[float]] = {}
  lows = []
  highs = []
  for line in constants.lines:
    growth = factor.value * _growth(line, sync_interval, power.value)
    lost = _on_line(line, num_replicas)
    lows.append(lost.low * growth)
    highs.append(lost.high * growth)
    # A mean for each size first, so that no size counts for its many lines.
    if line.doublings == "last":
      by_size.setdefault(line.parameters, []).append(lost.value * growth)
  value = float(np.mean([np.mean(lost) for lost in by_size.values()]))
  # The farther H lies from that of the nearest line, the more the uncertain
  # power of H matters. The distance is |log(H / H0)|.
  log_distance = min(
    abs(math.log(sync_interval / line.sync_interval))
    for line in constants.lines
  )
  half_range = (power.high - power.low) / 2
  interval_error = value * math.expm1(half_range * log_distance)
  # Three independent errors: of the lines, of the power of H, of the factor.
  low = value - math.hypot(
    value - min(lows),
    interval_error,
    value * (1 - factor.low / factor.value),
  )
  high = value + math.hypot(
    max(highs) - value,
    interval_error,
    value * (factor.high / factor.value - 1),
  )
  if steps is not None and low > 0:
    longer = max(steps / constants.longest_steps, 1.0)
    low *= longer**constants.length_power
  return Estimate(value, low, high)


def _on_line(line: Line, num_replicas: int) -> Estimate:
  """Returns D = a log2(M) - b on a line, and a range of two standard errors."""
  doublings_of_replicas = math.log2(num_replicas)
  lost = line.slope * doublings_of_replicas - line.offset
  # The errors of the slope and of the offset are correlated.
  variance = (
    (line.slope_error * doublings_of_replicas) ** 2
    + line.offset_error**2
    - 2
    * line.correlation
    * line.slope_error
    * line.offset_error
    * doublings_of_replicas
  )
  error = NUM_ERRORS * math.sqrt(max(variance, 0.0))
  return Estimate(lost, lost - error, lost + error)


def _growth(line: Line, sync_interval: int, power: float) -> float:
  """Returns (H / H0)^power, where H0 is the `sync_interval` of the line."""
  return (sync_interval / line.sync_interval) ** power


def _log_gap(lost: Estimate, gain: Estimate) -> Estimate:
  """Returns log(1 + gap) = -D log(1 - s), with its range.

  `lost` is D, the number of times that AllReduce's batch is halved. `gain` is
  s, the share by which its loss falls if the batch doubles.
  """
  doubling, doubling_low, doubling_high = (
    -math.log1p(-share) for share in (gain.value, gain.low, gain.high)
  )
  value = lost.value * doubling
  # Two independent errors: of D and of s.
  return Estimate(
    value=value,
    low=value
    - math.hypot(
      (lost.value - lost.low) * doubling,
      lost.value * (doubling - doubling_low),
    ),
    high=value
    + math.hypot(
      (lost.high - lost.value) * doubling,
      lost.value * (doubling_high - doubling),
    ),
  )


def _with_excess(diloco: Estimate, method: str) -> Estimate:
  """Adds a method's excess in a small model to DiLoCo's log(1 + gap)."""
  constants = law()
  factor = constants.factors.get(method, constants.unmeasured_factor)
  # log(1 + gap) is proportional to the method's factor, which is 1 for DiLoCo.
  value, low, high = (
    (each - 1) * constants.diloco_log_gap
    for each in (factor.value, factor.low, factor.high)
  )
  return Estimate(
    value=diloco.value + value,
    low=diloco.low + low,
    high=diloco.high + high,
  )


def _between(first: Estimate, second: Estimate) -> Estimate:
  """Returns the middle of two estimates, with a range that covers both."""
  return Estimate(
    value=(first.value + second.value) / 2,
    low=min(first.low, second.low),
    high=max(first.high, second.high),
  )


def _notes(
  constants: Law,
  num_replicas: int,
  sync_interval: int,
  method: str,
  steps: int | None,
) -> tuple[str, ...]:
  """Returns a sentence for each way in which the prediction extrapolates."""
  notes = []
  if num_replicas > constants.most_replicas:
    notes.append(
      f"No run behind the law has more than {constants.most_replicas} replicas."
    )
  smallest, largest = constants.interval_range
  if not smallest <= sync_interval <= largest:
    notes.append(
      f"The runs behind the law have an H of {smallest} to {largest}."
    )
  if method not in constants.factors:
    notes.append(f"The gap of {method} was not measured.")
  if steps is not None and steps > constants.longest_steps:
    notes.append(
      f"The runs behind the law have at most {constants.longest_steps:,} steps,"
      " and the gap falls in longer ones: expect the lower half of the range."
    )
  return tuple(notes)
