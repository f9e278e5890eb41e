"""Formats numbers with units for people to read, the same in all reports."""

import math

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_COUNTS = ("", "k", "M", "B", "T")
_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


def _scaled(value: float | int, names: tuple[str, ...]) -> tuple[float, str]:
  """Returns the largest power of 1000 up to a value, and its name.

  For 27,900,000 and the names of bytes, the result is (1000^2, "MB"). `names`
  has the names of 1000^0, 1000^1 and so on. The result is 1000^0 for values
  below 1, NaN and infinity.
  """
  index = 0
  if value and math.isfinite(value):
    index = int(math.log10(abs(value)) // 3)
  index = min(max(index, 0), len(names) - 1)
  return 1000.0**index, names[index]


def tokens_unit(largest: float | int) -> tuple[float, str]:
  """Returns the divisor and the unit of an axis of tokens: 1e6, "M tokens".

  `largest` is the largest number of tokens on the axis.
  """
  divisor, prefix = _scaled(largest, _COUNTS)
  return divisor, f"{prefix} tokens".strip()


def time_unit(seconds: float | int) -> tuple[float, str]:
  """Returns the divisor and the unit of a time: (60.0, "min") for 90 s.

  The unit is the largest of "h", "min" and "s" in which the time is at least 1.
  A time below 1 s has the unit "s".
  """
  for divisor, unit in _TIMES:
    if seconds >= divisor:
      return divisor, unit
  return _TIMES[-1]


def _short(value: float | int) -> str:
  """Formats a number with at most two decimals: "2.79", "27.9" or "279"."""
  if abs(value) >= 100:
    return f"{value:.0f}"
  if abs(value) >= 10:
    return f"{value:.1f}"
  return f"{value:.2f}"


def _divided(value: float | int, divisor: float) -> str:
  """Formats a value in units of `divisor`, a power of 1000.

  There are no decimals if the divisor is 1, and otherwise at most two.
  """
  if divisor == 1:
    return f"{value:.0f}"
  return _short(value / divisor)


def human_bytes(value: float | int) -> str:
  """Formats bytes: "279 B" or "27.9 MB"; "-" for NaN and infinity."""
  if not math.isfinite(value):
    return "-"
  divisor, unit = _scaled(value, _BYTES)
  return f"{_divided(value, divisor)} {unit}"


def human_tokens(value: float | int) -> str:
  """Formats tokens in powers of 1000: "279 tokens" or "1.23 M tokens".

  NaN and infinity become "nan tokens" and "inf tokens".
  """
  divisor, unit = tokens_unit(value)
  return f"{_divided(value, divisor)} {unit}"


def human_time(seconds: float | int, error_s: float = math.nan) -> str:
  """Formats a time: "18 s", "2.67 min" or "2,020 h"; "-" if it is not finite.

  A finite standard error follows in the same unit: "22.9 ± 0.54 s".
  """
  if not math.isfinite(seconds):
    return "-"
  divisor, unit = time_unit(seconds)
  number = seconds / divisor
  if number >= 999.5:
    text = f"{number:,.0f}"  # Three digits would give "1e+03".
  else:
    text = f"{number:.3g}"
  if math.isfinite(error_s):
    error = error_s / divisor
    # Two digits would give "1e+02".
    text += f" ± {error:,.0f}" if error >= 99.5 else f" ± {error:.2g}"
  return f"{text} {unit}"


def human_gap(share: float, error: float = math.nan) -> str:
  """Formats a relative difference: 0.0078 becomes "+0.78 %", NaN "-".

  `error` is the standard error, a fraction like `share`. If it is finite, it
  follows: "+0.78 ± 0.07 %".
  """
  if math.isnan(share):
    return "-"
  # Adding zero turns -0.0 into 0.0, so that its sign is "+".
  text = f"{round(100 * share, 2) + 0.0:+.2f}"
  return f"{text}{_plus_minus(100 * error, 2)} %"


def _plus_minus(error: float, digits: int) -> str:
  """Formats a standard error as " ± 0.07"; "" if it is not finite."""
  if not math.isfinite(error):
    return ""
  return f" ± {error:.{digits}f}"


def human_share(share: float) -> str:
  """Formats a fraction in per cent: 0.931 becomes "93.1 %".

  The result is "-" for NaN and infinity.
  """
  if not math.isfinite(share):
    return "-"
  return f"{100 * share:.1f} %"


def human_loss(value: float | int, error: float = math.nan) -> str:
  """Formats a loss with four decimals; "not finite" for NaN and infinity.

  A finite standard error of the loss follows: "2.9034 ± 0.0021".
  """
  if not math.isfinite(value):
    return "not finite"
  return f"{value:.4f}{_plus_minus(error, 4)}"


def human_ratio(value: float) -> str:
  """Formats a ratio: "2.53x", "25.3x" or "253x"; "-" for NaN and infinity."""
  if not math.isfinite(value):
    return "-"
  return f"{_short(value)}x"


def human_missing(count: int, wanted: int) -> str:
  """Returns a text such as " (2 of 3 seeds)"; "" if no seeds are missing."""
  if count == wanted:
    return ""
  return f" ({count} of {wanted} seeds)"


def human_comparison(gap: float, error: float = math.nan) -> str:
  """Describes a relative difference: -0.021 becomes "2.1 % lower".

  A difference of 0 becomes "0.0 % higher", and NaN "not known".
  `error` is the standard error, a fraction like `gap`. If it is finite, it
  follows: "2.1 ± 0.3 % lower".
  """
  if math.isnan(gap):
    return "not known"
  size = f"{100 * abs(gap):.1f}{_plus_minus(100 * error, 1)} %"
  direction = "lower" if gap < 0 else "higher"
  return f"{size} {direction}"
