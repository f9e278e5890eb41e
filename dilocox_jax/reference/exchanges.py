"""Averages over replicas: plain, lossy, by thin factors, with error feedback.

An exchange has one method: from the replicas' trees to their mean, and what
each replica's own tree had become on the way. The fast code is in
aggregators/exchange.py (`Mean`, `Lossy`, `ErrorFeedback`),
aggregators/reduce_scatter.py (`Scattered`) and codecs/low_rank.py
(`SharedFactors`). Averages in pairs are in `reference.pairs`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

# Arrays by name: parameters, gradients or pseudo-gradients.
Arrays = dict[str, np.ndarray]
# From the name of a leaf and its values to what is received of them.
Codec = Callable[[str, np.ndarray], np.ndarray]


def are_finite(tree: Arrays) -> bool:
  """Whether all values of a tree are finite."""
  return all(np.isfinite(leaf).all() for leaf in tree.values())


def zeros_like(tree: Arrays) -> Arrays:
  """A tree of zeros."""
  return {name: np.zeros_like(leaf) for name, leaf in tree.items()}


class Mean:
  """The plain mean of those replicas whose values are finite.

  If no replica is finite, the mean is zero.
  """

  def average(self, trees: list[Arrays]) -> tuple[Arrays, list[Arrays]]:
    """Returns the mean and the trees as they are."""
    counted = [tree for tree in trees if are_finite(tree)]
    mean = {
      name: sum((tree[name] for tree in counted), np.zeros_like(leaf))
      / max(len(counted), 1)
      for name, leaf in trees[0].items()
    }
    return mean, trees


@dataclasses.dataclass
class Lossy:
  """The mean of what is received of each replica.

  A replica that is not finite is left out, as by `Mean`.

  Attributes:
    codec: C, for the values.
    of_means: What the mean goes through, as after a reduce-scatter, where
      whoever averaged a part sends it on; None: the mean is not rounded.
  """

  codec: Codec
  of_means: Codec | None = None

  def average(self, trees: list[Arrays]) -> tuple[Arrays, list[Arrays]]:
    """Returns the mean of what was received, and that of each replica."""
    sent = [_received(t, self.codec) if are_finite(t) else t for t in trees]
    mean, _ = Mean().average(sent)
    return _received(mean, self.of_means) if self.of_means else mean, sent


def _received(tree: Arrays, codec: Codec) -> Arrays:
  return {name: codec(name, leaf) for name, leaf in tree.items()}


@dataclasses.dataclass
class Scattered:
  """The mean in slices, each rounded once more by the replica that owns it.

  A leaf of M replicas has M slices of whole rows, which are coded together;
  zeros fill the last one. Replica i owns slice i: it averages what it receives
  and its own exact values, and sends the mean on, rounded. Its share of the
  mean is what it had less what this rounding of the sum lost, so all shares
  together are the mean times their number. A replica that is not finite counts
  as zeros and owns its slice all the same.

  Example: replicas have 0.4 and 0.8, and codes are whole numbers. The owner has
  0.4 and receives 1, the mean is 0.7, and all receive 1. The shares are
  0.4 - 2 (0.7 - 1) = 1 and 1.

  Attributes:
    codec: C, for slices [M, values].
    width: Function from a leaf's name and values to the length of a row.
    of_means: Codec of the means; None: C as well.
  """

  codec: Codec
  width: Callable[[str, np.ndarray], int] = lambda name, leaf: 1
  of_means: Codec | None = None

  def average(self, trees: list[Arrays]) -> tuple[Arrays, list[Arrays]]:
    """Returns the mean that all received, and each replica's share of it."""
    finite = [are_finite(tree) for tree in trees]
    count = max(sum(finite), 1)
    owners = np.arange(len(trees))
    mean: Arrays = {}
    shares: list[Arrays] = [{} for _ in trees]
    for name, leaf in trees[0].items():
      width = self.width(name, leaf)
      had = np.stack(
        [
          slices_of(
            tree[name] if known else np.zeros_like(leaf), len(trees), width
          )
          for tree, known in zip(trees, finite, strict=True)
        ]
      )
      share = np.stack([self.codec(name, slices) for slices in had])
      share[owners, owners] = had[owners, owners]
      exact = share.sum(axis=0) / count
      rounded = (self.of_means or self.codec)(name, exact)
      share[owners, owners] -= count * (exact - rounded)
      mean[name] = leaf_of_slices(rounded, leaf.shape)
      for tree, slices in zip(shares, share, strict=True):
        tree[name] = leaf_of_slices(slices, leaf.shape)
    return mean, [
      share if known else tree
      for share, tree, known in zip(shares, trees, finite, strict=True)
    ]


def slices_of(leaf: np.ndarray, count: int, width: int = 1) -> np.ndarray:
  """The values of a leaf as slices of equally many rows, [count, values].

  Args:
    leaf: Values of any shape, which are taken in order.
    count: Number of slices.
    width: Values of a row (count); a slice has whole rows.
  """
  size = width * -(-leaf.size // (width * count))
  padded = np.pad(leaf.ravel(), (0, count * size - leaf.size))
  return padded.reshape(count, size)


def leaf_of_slices(slices: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Reverses `slices_of`.

  Args:
    slices: Slices [count, values].
    shape: Shape of the leaf.
  """
  return slices.ravel()[: math.prod(shape)].reshape(shape)


@dataclasses.dataclass
class SharedFactors:
  """The mean of matrices, as two thin factors that are averaged themselves.

  Line by line, A_m being replica m's matrix and Q of the exchange before:

    P = mean over m of A_m Q      the first message
    P = orthonormal(P)            so that all replicas have one basis
    Q = mean over m of A_m^T P    the second message
    mean of A_m = P Q^T           for the outer step

  Vectors are in the first message as they are.

  Source: PowerSGD, Vogels et al., 2019, arXiv 1905.13727, Algorithm 1; DiLoCoX,
  arXiv 2506.21263, for factors that are quantized.

  Attributes:
    rank: Columns of the factors.
    factors: The exchange that averages factors.
    right: Q of every matrix, [..., columns, rank]; drawn at random at first.
  """

  rank: int
  factors: Any = dataclasses.field(default_factory=Mean)
  right: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

  def average(self, trees: list[Arrays]) -> tuple[Arrays, list[Arrays]]:
    """Returns the mean, and what each replica had in it."""
    start = {n: self._start(n, x) for n, x in trees[0].items() if x.ndim > 1}
    first = [
      {n: x @ start[n] if n in start else x for n, x in tree.items()}
      for tree in trees
    ]
    mean, sent = self.factors.average(first)
    basis = {name: np.linalg.qr(mean[name])[0] for name in start}
    second = [{n: tree[n].mT @ basis[n] for n in start} for tree in trees]
    self.right, rights = self.factors.average(second)
    mean, *sent = [
      tree | {name: basis[name] @ q[name].mT for name in start}
      for tree, q in zip([mean, *sent], [self.right, *rights], strict=True)
    ]
    return mean, sent

  def _start(self, name: str, matrix: np.ndarray) -> np.ndarray:
    *stack, rows, columns = matrix.shape
    shape = (*stack, columns, min(self.rank, rows, columns))
    drawn = np.random.default_rng(0).normal(size=shape)
    q = self.right.get(name, drawn)
    # A direction that was lost would stay lost: 0 finds none.
    q = np.where(q.any(axis=-2, keepdims=True), q, drawn)
    return q / np.linalg.norm(q, axis=-2, keepdims=True)


@dataclasses.dataclass
class ErrorFeedback:
  """What a lossy exchange has lost is added to the next one.

  sent_m = C(d_m + e_m), then e_m <- decay (d_m + e_m - R), where R is sent_m
  ("own") or the mean that was received ("mean"). A replica for which d_m + e_m
  is not finite is left out, and its residual becomes zero.

  Source: Seide et al., 2014; DiLoCoX, arXiv 2506.21263, Algorithm 2 ("mean":
  e_{t+1} = d_t - mean C(d_t), e_t being in d_t already); SparseLoCo, arXiv
  2508.15706 ("own", with decay).

  Attributes:
    exchange: The lossy exchange.
    decay: Share of the residual that is kept.
    against: "own" or "mean".
    residuals: Residual e of each replica; empty before the first exchange.
  """

  exchange: Any
  decay: float = 1.0
  against: str = "own"
  residuals: list[Arrays] = dataclasses.field(default_factory=list)

  def average(self, trees: list[Arrays]) -> tuple[Arrays, list[Arrays]]:
    """Returns the mean of what was sent, and what each replica sent."""
    wanted = trees
    if self.residuals:
      wanted = [
        {name: tree[name] + owed[name] for name in tree}
        for tree, owed in zip(trees, self.residuals, strict=True)
      ]
    mean, sent = self.exchange.average(wanted)
    self.residuals = [
      self._left(w, own if self.against == "own" else mean)
      for w, own in zip(wanted, sent, strict=True)
    ]
    return mean, sent

  def _left(self, wanted: Arrays, received: Arrays) -> Arrays:
    if not are_finite(wanted):
      return zeros_like(wanted)
    return {
      name: self.decay * (wanted[name] - received[name]) for name in wanted
    }
