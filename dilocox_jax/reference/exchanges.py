"""Averages over replicas in plain numpy: exact, lossy, or by low-rank factors.

Each class is an *exchange*. Its method `average` takes a tree (arrays by name)
of each replica. It returns the mean, and for each replica its part of the mean.
With `Mean` this part is the replica's own tree. With a lossy codec it is the
tree as the other replicas receive it.

The fast code of these classes is in the following files:

    Mean, Lossy, ErrorFeedback    aggregators/exchange.py
    Scattered                     aggregators/reduce_scatter.py
    SharedFactors                 codecs/low_rank.py
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

# Arrays by name: parameters, gradients or pseudo-gradients.
Arrays = dict[str, np.ndarray]
# Function (name of a leaf, its values) -> values as they are received.
Codec = Callable[[str, np.ndarray], np.ndarray]


def are_finite(tree: Arrays) -> bool:
  """Returns whether all values of a tree are finite."""
  return all(np.isfinite(leaf).all() for leaf in tree.values())


def zeros_like(tree: Arrays) -> Arrays:
  """Returns a tree of zeros with the names and shapes of a tree."""
  return {name: np.zeros_like(leaf) for name, leaf in tree.items()}


class Mean:
  """The plain mean of the replicas whose values are all finite.

  If no replica is finite, the mean is zero.
  """

  def average(self, trees: list[Arrays]) -> tuple[Arrays, list[Arrays]]:
    """Returns the mean of the finite trees, and all trees unchanged."""
    counted = [tree for tree in trees if are_finite(tree)]
    mean = {
      name: sum((tree[name] for tree in counted), np.zeros_like(leaf))
      / max(len(counted), 1)
      for name, leaf in trees[0].items()
    }
    return mean, trees


@dataclasses.dataclass
class Lossy:
  """The mean of the replicas' values, encoded and decoded by a codec.

  A replica that is not finite is left out, as by `Mean`.

  Attributes:
    codec: Codec of the values.
    of_means: Codec of the mean, for exchanges that send the mean on, such as a
      reduce-scatter. None: the mean is not encoded.
  """

  codec: Codec
  of_means: Codec | None = None

  def average(self, trees: list[Arrays]) -> tuple[Arrays, list[Arrays]]:
    """Encodes and decodes the tree of each replica, and averages the results.

    Returns the mean, and each tree as the others receive it. A tree that is not
    finite is not in the mean, and is returned unchanged.
    """
    sent = [
      _received(tree, self.codec) if are_finite(tree) else tree
      for tree in trees
    ]
    mean, _ = Mean().average(sent)
    if self.of_means is not None:
      mean = _received(mean, self.of_means)
    return mean, sent


def _received(tree: Arrays, codec: Codec) -> Arrays:
  """Returns a tree as it is received: encoded and decoded, leaf by leaf."""
  return {name: codec(name, leaf) for name, leaf in tree.items()}


@dataclasses.dataclass
class Scattered:
  """The mean in slices, each rounded once more by the replica that owns it.

  With M replicas, a leaf has M slices of whole rows, and zeros fill the last
  slices. Replica i owns slice i: it receives this slice from the others, each
  rounded by the codec, and averages them with its own exact values. Then it
  rounds the mean, and sends it to all replicas.

  A replica that is not finite does not participate: it is left out of the mean.
  But it still owns its slice, and averages it.

  The *share* of a replica is its part of the mean. In slices of other owners,
  it is the replica's values as these owners receive them. In the replica's own
  slice, it is the exact values minus n d. Here n is the number of participants,
  and d is the mean before it is rounded, minus the rounded mean. If all
  replicas participate, their shares add up to M times the rounded mean.

  Example: two replicas have 0.4 and 0.8, the first one is the owner, and the
  codec rounds to whole numbers. The owner keeps its 0.4, and receives 0.8
  rounded to 1. The mean of 0.4 and 1 is 0.7, and it is rounded to 1. So d is
  0.7 - 1 = -0.3. The share of the owner is 0.4 - 2 (-0.3) = 1, and the share of
  the other replica is the 1 that the owner received.

  Attributes:
    codec: Codec of the values, called with slices [M, values].
    width: Function (name of a leaf, its values) -> number of values in a row;
      by default a row is one value.
    of_means: Codec of the means, called with slices like `codec`. None: it is
      `codec`.
  """

  codec: Codec
  width: Callable[[str, np.ndarray], int] = lambda name, leaf: 1
  of_means: Codec | None = None

  def average(self, trees: list[Arrays]) -> tuple[Arrays, list[Arrays]]:
    """Averages trees in slices, each rounded by its owner.

    Returns the rounded mean, and the share of each replica: its part of the
    mean. A tree that is not finite is returned in the place of its share.
    """
    participates = [are_finite(tree) for tree in trees]
    count = max(sum(participates), 1)
    owners = np.arange(len(trees))
    mean: Arrays = {}
    shares: list[Arrays] = [{} for _ in trees]
    for name, leaf in trees[0].items():
      width = self.width(name, leaf)
      leaves = [
        tree[name] if counts else np.zeros_like(leaf)
        for tree, counts in zip(trees, participates, strict=True)
      ]
      # Slices [M, M, values]: the slices of each replica.
      values = np.stack([slices_of(each, len(trees), width) for each in leaves])
      share = np.stack([self.codec(name, slices) for slices in values])
      # An owner does not send its own slice, so it keeps the exact values.
      share[owners, owners] = values[owners, owners]
      exact = share.sum(axis=0) / count
      rounded = (self.of_means or self.codec)(name, exact)
      # Now the shares add up to `count` times the rounded mean.
      share[owners, owners] -= count * (exact - rounded)
      mean[name] = leaf_of_slices(rounded, leaf.shape)
      for tree, slices in zip(shares, share, strict=True):
        tree[name] = leaf_of_slices(slices, leaf.shape)
    return mean, [
      share if counts else tree
      for share, tree, counts in zip(shares, trees, participates, strict=True)
    ]


def slices_of(leaf: np.ndarray, count: int, width: int = 1) -> np.ndarray:
  """Divides the values of a leaf into slices of equally many rows.

  Args:
    leaf: Values of any shape, which are taken in order.
    count: Number of slices.
    width: Number of values in a row. Zeros fill up the last slices.

  Returns:
    Slices [count, values].
  """
  size = width * -(-leaf.size // (width * count))
  padded = np.pad(leaf.ravel(), (0, count * size - leaf.size))
  return padded.reshape(count, size)


def leaf_of_slices(slices: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Joins the slices of a leaf again, without the zeros that filled them."""
  return slices.ravel()[: math.prod(shape)].reshape(shape)


@dataclasses.dataclass
class SharedFactors:
  """Approximates the mean of matrices by the product of two thin factors.

  Replicas average the factors instead of the matrices. With the matrix A_m of
  replica m, and Q from the exchange before:

    P = mean over m of A_m Q      the first message
    P = orthonormal(P)            so that all replicas have one basis
    Q = mean over m of A_m^T P    the second message
    P Q^T                         in place of the mean of A_m

  Vectors are averaged as they are, in the first message.

  Source: PowerSGD, Vogels et al., 2019, arXiv 1905.13727, Algorithm 1. In
  DiLoCoX, arXiv 2506.21263, the factors are also quantized.

  Attributes:
    rank: Number of columns of the factors. A matrix with fewer rows or columns
      than this has factors with as many columns as its shorter side.
    factors: Exchange that averages the factors and the vectors.
    right: Q of every matrix by name, [..., columns of the matrix, columns of
      Q]. Empty before the first exchange, which draws Q at random.
  """

  rank: int
  factors: Any = dataclasses.field(default_factory=Mean)
  right: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

  def average(self, trees: list[Arrays]) -> tuple[Arrays, list[Arrays]]:
    """Averages matrices by their factors, and vectors as they are.

    Args:
      trees: A tree of each replica. Leaves of two or more axes are matrices
        [..., rows, columns].

    Returns:
      The mean, and the tree of each replica as the others receive it.
    """
    first_right = {
      name: self._first_right(name, leaf)
      for name, leaf in trees[0].items()
      if leaf.ndim > 1
    }
    first_messages = []
    for tree in trees:
      # In the first message, A Q takes the place of a matrix A; vectors stay.
      lefts = {name: tree[name] @ q for name, q in first_right.items()}
      first_messages.append(tree | lefts)
    mean, sent = self.factors.average(first_messages)
    # P, an orthonormal basis that all replicas compute from the mean of A Q.
    basis = {name: np.linalg.qr(mean[name])[0] for name in first_right}
    # The second message has A^T P of each matrix A.
    second_messages = [
      {name: tree[name].mT @ p for name, p in basis.items()} for tree in trees
    ]
    self.right, sent_rights = self.factors.average(second_messages)

    def decoded(tree: Arrays, right: Arrays) -> Arrays:
      # A matrix becomes P Q^T; vectors stay as the first message had them.
      return tree | {name: p @ right[name].mT for name, p in basis.items()}

    own_parts = [
      decoded(tree, right)
      for tree, right in zip(sent, sent_rights, strict=True)
    ]
    return decoded(mean, self.right), own_parts

  def _first_right(self, name: str, matrix: np.ndarray) -> np.ndarray:
    """Returns the right factor Q with which an exchange starts.

    Q is that of the exchange before. Without one, and for columns of zeros, it
    is random. All columns are scaled to length 1. The shape is [..., columns,
    r], where r is the smallest of `rank`, rows and columns.
    """
    *stack, rows, columns = matrix.shape
    shape = (*stack, columns, min(self.rank, rows, columns))
    drawn = np.random.default_rng(0).normal(size=shape)
    q = self.right.get(name, drawn)
    # A column of zeros would stay zero, so it is drawn at random again.
    q = np.where(q.any(axis=-2, keepdims=True), q, drawn)
    return q / np.linalg.norm(q, axis=-2, keepdims=True)


@dataclasses.dataclass
class ErrorFeedback:
  """Adds what a lossy exchange has lost to the next exchange.

  Replica m with the tree d_m and the residual e_m passes c_m = d_m + e_m to the
  exchange. The exchange returns the mean, and sent_m: the tree of replica m as
  the others receive it (with `Scattered`: its share). Then
  e_m <- decay (c_m - R), where R is sent_m ("own") or the mean ("mean"). A
  replica for which c_m is not finite is left out of the mean, and its residual
  becomes zero.

  Source: Seide et al., 2014; DiLoCoX, arXiv 2506.21263, Algorithm 2 ("mean":
  e_{t+1} = d_t - mean C(d_t), where C is the codec and d_t already contains
  e_t); SparseLoCo, arXiv 2508.15706 ("own", with decay).

  Attributes:
    exchange: The lossy exchange.
    decay: Fraction of the loss that becomes the residual, 0 to 1.
    against: What is subtracted from c_m to get the loss: "own" (sent_m) or
      "mean".
    residuals: Residual e of each replica; empty before the first exchange.
  """

  exchange: Any
  decay: float = 1.0
  against: str = "own"
  residuals: list[Arrays] = dataclasses.field(default_factory=list)

  def average(self, trees: list[Arrays]) -> tuple[Arrays, list[Arrays]]:
    """Averages trees plus residuals, and updates the residuals.

    Returns the mean, and the tree of each replica as the others receive it.
    """
    corrected_trees = trees
    if self.residuals:
      corrected_trees = [
        {name: tree[name] + residual[name] for name in tree}
        for tree, residual in zip(trees, self.residuals, strict=True)
      ]
    mean, sent = self.exchange.average(corrected_trees)
    received = sent if self.against == "own" else [mean] * len(sent)
    self.residuals = [
      self._residual(corrected, tree)
      for corrected, tree in zip(corrected_trees, received, strict=True)
    ]
    return mean, sent

  def _residual(self, corrected: Arrays, received: Arrays) -> Arrays:
    """Returns `decay` times (`corrected` - `received`).

    If `corrected` is not finite, the result is zeros.
    """
    if not are_finite(corrected):
      return zeros_like(corrected)
    return {
      name: self.decay * (corrected[name] - received[name])
      for name in corrected
    }
