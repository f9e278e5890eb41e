"""Averages over replicas: plain, lossy, and with error feedback.

An exchange has one method: from the replicas' trees to their mean, and what
each replica's own tree had become on the way. The fast code is in exchange/.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

Tree = dict[str, np.ndarray]


def is_finite(tree: Tree) -> bool:
  """Whether all values of a tree are finite."""
  return all(np.isfinite(leaf).all() for leaf in tree.values())


class Mean:
  """The plain mean of those replicas whose values are finite."""

  def average(self, trees: list[Tree]) -> tuple[Tree, list[Tree]]:
    """Returns the mean and the trees as they are."""
    counted = [tree for tree in trees if is_finite(tree)]
    mean = {
      name: sum((tree[name] for tree in counted), np.zeros_like(leaf))
      / max(len(counted), 1)
      for name, leaf in trees[0].items()
    }
    return mean, trees


@dataclasses.dataclass
class Lossy:
  """The mean of what is received of each replica, with error feedback.

  sent_m = C(d_m + e_m), then e_m <- decay (d_m + e_m - R), where R is sent_m
  ("own") or the mean of what was sent ("mean"). A replica whose values are not
  finite is left out, and its residual becomes zero.

  Source: Seide et al., 2014; DiLoCoX, arXiv 2506.21263, Algorithm 2 ("mean");
  SparseLoCo, arXiv 2508.15706 ("own", with decay).

  Attributes:
    codec: From a leaf's name and values to what is received of them.
    feedback: Whether residuals are kept at all.
    decay: Share of the residual that is kept.
    against: "own" or "mean".
    residuals: Residual of each replica.
  """

  codec: Callable[[str, np.ndarray], np.ndarray]
  feedback: bool = False
  decay: float = 1.0
  against: str = "own"
  residuals: list[Tree] = dataclasses.field(default_factory=list)

  def average(self, trees: list[Tree]) -> tuple[Tree, list[Tree]]:
    """Returns the mean of what was sent, and what each replica sent."""
    wanted = [
      {name: leaf + self._residual(m, name) for name, leaf in tree.items()}
      for m, tree in enumerate(trees)
    ]
    sent = [
      {name: self.codec(name, leaf) for name, leaf in tree.items()}
      if is_finite(tree)
      else tree
      for tree in wanted
    ]
    mean, _ = Mean().average(sent)
    if self.feedback:
      self.residuals = [
        {
          name: self._left(want[name], mean[name], own[name], is_finite(want))
          for name in want
        }
        for want, own in zip(wanted, sent, strict=True)
      ]
    return mean, sent

  def _residual(self, replica: int, name: str):
    return self.residuals[replica][name] if self.residuals else 0.0

  def _left(self, want, mean, own, participated: bool):
    if not participated:
      return np.zeros_like(want)
    return self.decay * (want - (own if self.against == "own" else mean))
