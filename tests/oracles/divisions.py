"""An exchange that encodes the part of each device by itself.

The package does not do so: its codecs work on whole leaves, whatever devices
hold them. Tests show with this exchange that they would notice the difference.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from dilocox_jax.reference.exchanges import Arrays


@dataclasses.dataclass
class OfParts:
  """Cuts leaves into the parts of the devices, and exchanges them as leaves.

  So each part has scales, factors and residuals of its own.

  Attributes:
    exchange: Averages the parts.
    counts: Number of parts along each dimension of a leaf, by path. Leaves
      without an entry are not cut. A slice "path@number" is cut like its leaf.
  """

  exchange: Any
  counts: Mapping[str, tuple[int, ...]]

  def average(self, trees: list[Arrays]) -> tuple[Arrays, list[Arrays]]:
    """Averages the trees part by part."""
    mean, sent = self.exchange.average([self._cut(tree) for tree in trees])
    return self._joined(mean, trees[0]), [
      self._joined(parts, trees[0]) for parts in sent
    ]

  def _cut(self, tree: Arrays) -> Arrays:
    return {
      f"{name}#{number}": leaf[place]
      for name, leaf in tree.items()
      for number, place in enumerate(self._places(name, leaf))
    }

  def _joined(self, parts: Arrays, like: Arrays) -> Arrays:
    joined = {name: np.empty_like(leaf) for name, leaf in like.items()}
    for name, leaf in joined.items():
      for number, place in enumerate(self._places(name, leaf)):
        leaf[place] = parts[f"{name}#{number}"]
    return joined

  def _places(self, name: str, leaf: np.ndarray) -> list[tuple[slice, ...]]:
    """Where the parts of a leaf are. Their sizes differ by at most one."""
    counts = self.counts.get(name.split("@")[0], (1,) * leaf.ndim)
    cuts = [
      [slice(n * size // count, (n + 1) * size // count) for n in range(count)]
      for size, count in zip(leaf.shape, counts, strict=True)
    ]
    return list(itertools.product(*cuts))
