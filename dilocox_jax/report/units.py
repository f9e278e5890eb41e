"""Numbers as people read them: one place, so text, tables and axes agree."""

import math

_BYTES = ("B", "kB", "MB", "GB", "TB", "PB")
_COUNTS = ("", "k", "M", "B", "T")


def _scaled(value: float | int, names: tuple[str, ...]) -> tuple[float, str]:
  """Divides by the power of 1000 that leaves at least one whole digit."""
  index = 0
  if value and math.isfinite(value):
    index = int(math.log10(abs(value)) // 3)
  index = min(max(index, 0), len(names) - 1)
  return 1000.0**index, names[index]


def bytes_unit(largest: float | int) -> tuple[float, str]:
  """The divisor and the unit that suit values up to `largest` bytes."""
  return _scaled(largest, _BYTES)


def tokens_unit(largest: float | int) -> tuple[float, str]:
  """The divisor and the unit that suit values up to `largest` tokens."""
  divisor, prefix = _scaled(largest, _COUNTS)
  return divisor, f"{prefix} tokens".strip()


def _three_digits(value: float | int) -> str:
  digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
  return f"{value:.{digits}f}"


def human_bytes(value: float | int) -> str:
  """Bytes in powers of 1000, three digits: "27.9 MB"."""
  divisor, unit = bytes_unit(value)
  return (
    f"{value} B"
    if divisor == 1
    else _three_digits(value / divisor) + f" {unit}"
  )


def bytes_tick(value: float | int) -> str:
  """Bytes as a label on an axis: "20 MB"."""
  divisor, unit = bytes_unit(value)
  return f"{value / divisor:g} {unit}"


def human_tokens(value: float | int) -> str:
  """Tokens in powers of 1000, three digits: "1.23 M tokens"."""
  divisor, unit = tokens_unit(value)
  number = f"{value}" if divisor == 1 else _three_digits(value / divisor)
  return f"{number} {unit}"


def human_gap(share: float) -> str:
  """A difference as a share, in per cent and signed: "+0.78 %"."""
  return "-" if math.isnan(share) else f"{100 * share:+.2f} %"


def human_share(share: float) -> str:
  """A part of a whole in per cent: "93.1 %"."""
  return f"{100 * share:.1f} %" if math.isfinite(share) else "-"


def human_loss(value: float | int) -> str:
  """Four decimals, or a word where there is no number."""
  return f"{value:.4f}" if math.isfinite(value) else "not finite"


def human_ratio(value: float) -> str:
  """How many times, three digits: "25.3x"; a dash where that has no meaning."""
  return f"{_three_digits(value)}x" if math.isfinite(value) else "-"
