"""Codecs: what is received of values that travel in few bits.

Written with loops, for one group of values at a time and in float64. A group
has one scale, which is a bfloat16 number. `nearest`, `two_magnitudes`, `signs`
and `powers_of_two` return the codes that are sent and the values that are
received. The fast code packs the codes into bytes: codecs/quantize.py (few
bits), codecs/sparse.py (`largest`) and codecs/low_rank.py (`low_rank`).
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Group = Sequence | np.ndarray


def bfloat16(number: float | np.floating) -> float:
  """The nearest number of eight significant bits."""
  mantissa, exponent = np.frexp(number)
  return float(np.ldexp(np.round(mantissa * 256) / 256, exponent))


def nearest(values: Group, bits: int) -> tuple[list, list]:
  """8 and 4 bits: the nearest of evenly spaced levels around zero.

  With a largest size of 1.4, 4 bits have steps of 0.2, so 0.6 is code 3 + 8.
  Source: CocktailSGD (ICML 2023); DiLoCoX, arXiv 2506.21263, for 4 bits.
  """
  reach = 2 ** (bits - 1) - 1
  scale = bfloat16(max(abs(x) for x in values) / reach)
  steps = [
    min(max(round(x / scale), -reach), reach) if scale else 0 for x in values
  ]
  return [step + reach + 1 for step in steps], [step * scale for step in steps]


def two_magnitudes(values: Group) -> tuple[list, list]:
  """2 bits: the means of what lies above and below the mean of |x|.

  Source: SparseLoCo, arXiv 2508.15706, and MuLoCo, arXiv 2505.23725, for 2
  bits; these four levels are ours.
  """
  middle = sum(abs(x) for x in values) / len(values)
  low = [abs(x) for x in values if abs(x) <= middle]
  high = [abs(x) for x in values if abs(x) > middle]
  magnitudes = [
    bfloat16(np.mean(part)) if part else 0.0 for part in (low, high)
  ]
  codes = [2 * int(x < 0) + int(abs(x) > middle) for x in values]
  levels = [*magnitudes, *(-size for size in magnitudes)]
  return codes, [levels[code] for code in codes]


def signs(values: Group) -> tuple[list, list]:
  """1 bit: the sign times the mean of |x|. Source: Seide et al., 2014."""
  scale = bfloat16(sum(abs(x) for x in values) / len(values))
  codes = [int(x < 0) for x in values]
  return codes, [-scale if code else scale for code in codes]


# Whole numbers of so many bits.
BY_BITS: Mapping[int, Callable] = {
  8: functools.partial(nearest, bits=8),
  4: functools.partial(nearest, bits=4),
  2: two_magnitudes,
  1: signs,
}


def powers_of_two(values: Group) -> tuple[list, list]:
  """E3M0: the nearest of 0 and the seven powers of two up to the scale.

  Source: Streaming DiLoCo, arXiv 2501.18512, section 2.4; the scale is ours.
  """
  scale = bfloat16(max(abs(x) for x in values))
  levels = [0.0] + [scale * 2.0**power for power in range(-6, 1)]
  codes = []
  for x in values:
    level = min(range(8), key=lambda number: abs(levels[number] - abs(x)))
    codes.append(level + 8 * int(x < 0))
  levels += [-level for level in levels]
  return codes, [levels[code] for code in codes]


def largest(values: Group, count: int) -> tuple[list, list]:
  """The places of the largest values, ascending, and what is left of all.

  Values are compared in bfloat16; of equal ones the first are the larger.
  Source: CocktailSGD (ICML 2023); SparseLoCo, arXiv 2508.15706.
  """
  sizes = [bfloat16(abs(x)) for x in values]
  order = sorted(range(len(values)), key=lambda place: -sizes[place])
  places = sorted(order[:count])
  return places, [x if n in places else 0.0 for n, x in enumerate(values)]


def low_rank(
  matrix: np.ndarray, start: np.ndarray, iterations: int = 1
) -> np.ndarray:
  """A matrix in the basis that power iterations find: P (A^T P)^T.

  This is what one replica finds alone; see `exchanges.SharedFactors`.
  Source: Halko et al., 2011, arXiv 0909.4061, Algorithm 4.4.

  Args:
    matrix: A, [rows, columns].
    start: Right factor to start from, [columns, rank].
    iterations: Power iterations.
  """
  left = matrix
  right = start
  for _ in range(iterations):
    left, _ = np.linalg.qr(matrix @ right)
    right = matrix.T @ left
  return left @ right.T


def in_groups(
  layers: np.ndarray, size: int, received: Callable[[list], Group]
) -> np.ndarray:
  """What is received of every layer, in groups of one length.

  A layer of 100 values in groups of 40 at most makes three groups of 34, the
  last of which is filled up with zeros.

  Args:
    layers: Values, [layers, values].
    size: Largest length of a group.
    received: From a group's values to what is received of them.
  """
  groups = -(-layers.shape[1] // size)
  width = -(-layers.shape[1] // groups)
  found = []
  for values in layers:
    padded = np.pad(values, (0, groups * width - len(values)))
    parts = [received(list(part)) for part in padded.reshape(groups, -1)]
    found.append(np.concatenate(parts)[: len(values)])
  return np.array(found)


def in_blocks(rounding: Callable, size: int = 128) -> Callable:
  """A codec for `exchanges.Lossy` of a rounding of groups.

  Args:
    rounding: From a group's values to their codes and what is received.
    size: Largest length of a group.
  """

  def codec(name: str, leaf: np.ndarray) -> np.ndarray:
    del name
    flat = leaf.reshape(1, -1)
    return in_groups(flat, size, lambda x: rounding(x)[1]).reshape(leaf.shape)

  return codec
