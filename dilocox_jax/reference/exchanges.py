"""Averages over replicas: plain, lossy, and with error feedback.

An exchange has one method: from the replicas' trees to their mean, and what
each replica's own tree had become on the way. The fast code is in
exchange/mean.py (`Mean`), exchange/compressed.py and exchange/feedback.py
(`Lossy`).
"""

import dataclasses
from collections.abc import Callable

import numpy as np

# Arrays by name: parameters, gradients or pseudo-gradients.
Leaves = dict[str, np.ndarray]


def is_finite(tree: Leaves) -> bool:
  """Whether all values of a tree are finite."""
  return all(np.isfinite(leaf).all() for leaf in tree.values())


class Mean:
  """The plain mean of those replicas whose values are finite.

  If no replica is finite, the mean is zero.
  """

  def average(self, trees: list[Leaves]) -> tuple[Leaves, list[Leaves]]:
    """Returns the mean and the trees as they are."""
    counted = [tree for tree in trees if is_finite(tree)]
    mean = {
      name: sum((tree[name] for tree in counted), np.zeros_like(leaf))
      / max(len(counted), 1)
      for name, leaf in trees[0].items()
    }
    return mean, trees


def _unchanged(leaf: np.ndarray) -> np.ndarray:
  return leaf


@dataclasses.dataclass
class Lossy:
  """The mean of what is received of each replica, with error feedback.

  sent_m = C(d_m + e_m), then e_m <- decay (d_m + e_m - R), where R is sent_m
  ("own") or the mean of what was sent ("mean"). A replica for which d_m + e_m
  is not finite is left out, and its residual becomes zero.

  Source: Seide et al., 2014; DiLoCoX, arXiv 2506.21263, Algorithm 2 ("mean":
  e_{t+1} = d_t + e_t - mean C(d_t + e_t)); SparseLoCo, arXiv 2508.15706
  ("own", with decay).

  Attributes:
    codec: C, from a leaf's name and values to what is received of them.
    feedback: Whether residuals are kept at all.
    decay: Share of the residual that is kept.
    against: "own" or "mean".
    rounds_mean: Whether the mean goes through the codec too, as after a
      reduce-scatter, where whoever averaged a part sends it on.
    stored: From a residual's leaf to what the memory keeps of it.
    residuals: Residual e of each replica; empty before the first exchange.
  """

  codec: Callable[[str, np.ndarray], np.ndarray]
  feedback: bool = False
  decay: float = 1.0
  against: str = "own"
  rounds_mean: bool = False
  stored: Callable[[np.ndarray], np.ndarray] = _unchanged
  residuals: list[Leaves] = dataclasses.field(default_factory=list)

  def average(self, trees: list[Leaves]) -> tuple[Leaves, list[Leaves]]:
    """Returns the mean of what was sent, and what each replica sent."""
    wanted = trees
    if self.residuals:
      wanted = [
        {name: tree[name] + owed[name] for name in tree}
        for tree, owed in zip(trees, self.residuals, strict=True)
      ]
    sent = [self._received(w) if is_finite(w) else w for w in wanted]
    mean, _ = Mean().average(sent)
    if self.rounds_mean:
      mean = self._received(mean)
    if self.feedback:
      self.residuals = [
        self._left(w, own if self.against == "own" else mean)
        for w, own in zip(wanted, sent, strict=True)
      ]
    return mean, sent

  def _received(self, tree: Leaves) -> Leaves:
    return {name: self.codec(name, leaf) for name, leaf in tree.items()}

  def _left(self, wanted: Leaves, received: Leaves) -> Leaves:
    if not is_finite(wanted):
      return {name: np.zeros_like(leaf) for name, leaf in wanted.items()}
    return {
      name: self.stored(self.decay * (wanted[name] - received[name]))
      for name in wanted
    }
