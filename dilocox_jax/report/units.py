"""Formats numbers with units for people to read.

Text, tables and axes of reports all use these functions, so they look alike.
"""

import math

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_COUNTS = ("", "k", "M", "B", "T")
_TIMES = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


def _scaled(value: float | int, names: tuple[str, ...]) -> tuple[float, str]:
  """Returns the largest power of 1000 that is at most a value, and its name."""
  index = 0
  if value and math.isfinite(value):
    index = int(math.log10(abs(value)) // 3)
  index = min(max(index, 0), len(names) - 1)
  return 1000.0**index, names[index]


def tokens_unit(largest: float | int) -> tuple[float, str]:
  """Returns divisor and unit for an axis of values up to `largest` tokens."""
  divisor, prefix = _scaled(largest, _COUNTS)
  return divisor, f"{prefix} tokens".strip()


def time_unit(seconds: float | int) -> tuple[float, str]:
  """Returns divisor and unit (h, min or s) in which a time is at least 1.

  Args:
    seconds: The largest value of a linear axis, the smallest of a
      logarithmic one. Times below a second keep the unit s.
  """
  suitable = (unit for unit in _TIMES if seconds >= unit[0])
  return next(suitable, _TIMES[-1])


def _three_digits(value: float | int) -> str:
  digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
  return f"{value:.{digits}f}"


def human_bytes(value: float | int) -> str:
  """Formats bytes with three digits: "27.9 MB"; "-" for NaN and infinity."""
  divisor, unit = _scaled(value, _BYTES)
  number = f"{value:.0f}" if divisor == 1 else _three_digits(value / divisor)
  return f"{number} {unit}" if math.isfinite(value) else "-"


def human_tokens(value: float | int) -> str:
  """Formats tokens with three digits in powers of 1000: "1.23 M tokens"."""
  divisor, unit = tokens_unit(value)
  number = f"{value:.0f}" if divisor == 1 else _three_digits(value / divisor)
  return f"{number} {unit}"


def human_time(seconds: float | int, error_s: float = math.nan) -> str:
  """Formats a time with three digits: "18 s", "2.67 min" or "2,020 h".

  Args:
    seconds: The time.
    error_s: Its standard error, which follows in the same unit if it is known:
      "22.9 ± 0.54 s".
  """
  if not math.isfinite(seconds):
    return "-"
  divisor, unit = time_unit(seconds)
  number = seconds / divisor
  # From 999.5 on three digits would be "1e+03".
  text = f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}"
  if math.isfinite(error_s):
    text += f" ± {error_s / divisor:,.2g}"
  return f"{text} {unit}"


def human_gap(share: float, error: float = math.nan) -> str:
  """Formats a relative difference in per cent with its sign: "+0.78 %".

  Args:
    share: The difference.
    error: Its standard error, which follows if it is known: "+0.78 ± 0.07 %".
  """
  if math.isnan(share):
    return "-"
  # Adding zero takes the sign from what rounds to nothing.
  text = f"{round(100 * share, 2) + 0.0:+.2f}"
  return f"{text}{_plus_minus(100 * error, 2)} %"


def _plus_minus(error: float, digits: int) -> str:
  return f" ± {error:.{digits}f}" if math.isfinite(error) else ""


def human_share(share: float) -> str:
  """Formats a share in per cent, 0.931 as "93.1 %"; "-" if it is not finite."""
  return f"{100 * share:.1f} %" if math.isfinite(share) else "-"


def human_loss(value: float | int, error: float = math.nan) -> str:
  """Formats a loss with four decimals; "not finite" for NaN and infinity.

  Args:
    value: The loss.
    error: Its standard error, which follows if it is known.
  """
  if not math.isfinite(value):
    return "not finite"
  return f"{value:.4f}{_plus_minus(error, 4)}"


def human_ratio(value: float) -> str:
  """Formats a ratio with three digits: "25.3x"; "-" for NaN and infinity."""
  return f"{_three_digits(value)}x" if math.isfinite(value) else "-"


def human_missing(count: int, wanted: int) -> str:
  """Returns " (2 of 3 seeds)" if seeds are missing, else an empty text."""
  return "" if count == wanted else f" ({count} of {wanted} seeds)"


def human_comparison(gap: float, error: float = math.nan) -> str:
  """Describes a relative difference: "0.8 % higher" or "2.1 % lower".

  Args:
    gap: The difference.
    error: Its standard error, which is named if it is known.
  """
  size = f"{100 * abs(gap):.1f}{_plus_minus(100 * error, 1)} %"
  return f"{size} {'lower' if gap < 0 else 'higher'}"
