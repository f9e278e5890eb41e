"""Codecs in plain float64 with loops, for one group of values at a time."""

import numpy as np


def bfloat16(number):
  """The nearest number of eight significant bits."""
  mantissa, exponent = np.frexp(number)
  return float(np.ldexp(np.round(mantissa * 256) / 256, exponent))


def nearest(values, bits):
  """8 and 4 bits: evenly spaced levels around zero."""
  reach = 2 ** (bits - 1) - 1
  scale = bfloat16(max(abs(x) for x in values) / reach)
  codes, decoded = [], []
  for x in values:
    step = min(max(round(x / scale), -reach), reach) if scale else 0
    codes.append(step + reach + 1)
    decoded.append(step * scale)
  return codes, decoded


def two_magnitudes(values):
  """2 bits: the means of what lies above and below the mean of |x|."""
  middle = sum(abs(x) for x in values) / len(values)
  low = [abs(x) for x in values if abs(x) <= middle]
  high = [abs(x) for x in values if abs(x) > middle]
  magnitudes = [
    bfloat16(np.mean(part)) if part else 0.0 for part in (low, high)
  ]
  codes, decoded = [], []
  for x in values:
    is_large = int(abs(x) > middle)
    codes.append(2 * int(x < 0) + is_large)
    decoded.append(-magnitudes[is_large] if x < 0 else magnitudes[is_large])
  return codes, decoded


def signs(values):
  """1 bit: the sign times the mean of |x|."""
  scale = bfloat16(sum(abs(x) for x in values) / len(values))
  codes = [int(x < 0) for x in values]
  return codes, [-scale if code else scale for code in codes]


def powers_of_two(values):
  """E3M0: the nearest of 0 and the seven powers of two up to the scale."""
  scale = bfloat16(max(abs(x) for x in values))
  levels = [0.0] + [scale * 2.0**power for power in range(-6, 1)]
  codes, decoded = [], []
  for x in values:
    level = min(range(8), key=lambda number: abs(levels[number] - abs(x)))
    codes.append(level + 8 * int(x < 0))
    decoded.append(-levels[level] if x < 0 else levels[level])
  return codes, decoded


def top_k(values, count):
  """The places of the largest values, ascending, and what is left of all.

  Values are compared in bfloat16; of equal ones the first are the larger.
  """
  sizes = [bfloat16(abs(x)) for x in values]
  order = sorted(range(len(values)), key=lambda place: -sizes[place])
  places = sorted(order[:count])
  return places, [x if n in places else 0.0 for n, x in enumerate(values)]


def power_iteration(matrix, start):
  """One pass of PowerSGD with Gram-Schmidt: the decoded matrix."""
  basis = []
  for column in (matrix @ start).T:
    for direction in basis:
      column = column - (direction @ column) * direction
    basis.append(column / np.sqrt(column @ column))
  left = np.stack(basis, axis=1)
  return left @ (matrix.T @ left).T
