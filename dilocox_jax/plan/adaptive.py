"""Adaptive compression: the rank and the H of the next rounds.

The rank of the averaged update is measured in every round. After some rounds
their mean sets the next rank. Ranks are on a short ladder, since every rank has
a program of its own. H follows the bytes: at the first rank a transfer takes no
longer than H inner steps, and a smaller rank needs proportionally fewer steps
to hide behind. Everything here is a pure function of what was measured, so a
run that is resumed goes on as if it had not been interrupted.

Low-rank factors carry the spectrum of what they send: with an orthonormal left
factor, the singular values of the right one are those of the product. The
*energy rank* is the number of directions that hold a given share of the squared
norm. Of the spectrum (8, 1, 0.5, 0.5), whose squared norm is 10, it is 3 for a
share of 0.95 and 2 for 0.9.

With a first rank of 16 the ladder is 16, 10, 6, 3, 2. A measured mean of 8
needs 8 / 0.9 = 8.9, so the next rank is 10. If a sync at rank 10 has 0.65 times
the bytes of one at rank 16, H = 30 becomes ceil(30 x 0.65) = 20.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

MODES = ("off", "rank", "rank_and_interval")
# An update that fills more of its rank than this share may have directions
# that were not sent. A tenth is left free, so that those can be seen.
_FULL = 0.9


@dataclasses.dataclass(frozen=True)
class RoundSetting:
  """Rank and H of some rounds.

  Attributes:
    rank: Rank of low-rank factors; 0 where there are none.
    sync_interval: H (inner steps).
  """

  rank: int
  sync_interval: int


@dataclasses.dataclass(frozen=True)
class Policy:
  """Chooses settings from measurements.

  Source: DiLoCoX, arXiv 2506.21263, Algorithm 3 (recalled): r_t is the mean
  effective rank of a window, H_t = H_1 r_t / r_1. Differs: ranks move on a
  ladder; H follows the bytes, which are not quite proportional to the rank.

  Attributes:
    first: The setting of the first rounds: the largest rank, and its H.
    mode: What adapts, one of `MODES`.
    window_rounds: Rounds measured before each new setting, c.
    energy: Share of the squared norm that a rank must hold.
  """

  first: RoundSetting
  mode: str = "rank"
  window_rounds: int = 5
  energy: float = 0.95

  @property
  def ladder(self) -> tuple[int, ...]:
    """Ranks to choose among, descending, from the first to its eighth.

    Neighbors have about the same ratio, the fourth root of 8 = 1.68 for five
    ranks.
    """
    lowest = max(1, self.first.rank // 8)
    rungs = {
      round(self.first.rank * (lowest / self.first.rank) ** share)
      for share in (0, 1 / 4, 2 / 4, 3 / 4, 1)
    }
    return tuple(sorted(rungs, reverse=True))

  def next_setting(
    self, measured: Sequence[float | int], bytes_of: Callable[[int], int]
  ) -> RoundSetting:
    """Returns the lowest rank with room for what was measured, and its H.

    What is measured never exceeds the rank in force. So a rank that is too
    small grows by one rung at a time.

    Args:
      measured: Rank of the averaged update, one value for each round.
      bytes_of: Function from a rank to the bytes of a sync.
    """
    ladder = self.ladder
    needed = sum(measured) / len(measured) / _FULL
    rank = min([r for r in ladder if r >= needed], default=ladder[0])
    interval = self.first.sync_interval
    if self.mode == "rank_and_interval":
      # The shortest H that hides a transfer as the first H did.
      share = bytes_of(rank) / bytes_of(ladder[0])
      interval = max(1, math.ceil(interval * share))
    return RoundSetting(rank, interval)


def spectra_of(grams: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Computes squared singular values from the products of factors' columns.

  Args:
    grams: Gram matrices by path, [num_layers, rank, rank], with zeros in
      columns that are not in use. Arrays of other dimensions are left out.

  Returns:
    Spectra by path, [layers in use, rank in use], descending. Layers of zeros,
    which fill up short fragments, are left out, and so are leaves that have
    no other layers.
  """
  spectra = {}
  for path, gram in grams.items():
    if np.ndim(gram) != 3:
      continue
    is_used = np.diagonal(gram, 0, 1, 2) != 0
    layers, columns = is_used.any(axis=1), is_used.any(axis=0)
    if columns.any():
      square = gram[layers][:, columns][:, :, columns].astype(np.float64)
      values = np.linalg.eigvalsh(square)
      spectra[path] = np.maximum(values[:, ::-1], 0)
  return spectra


def energy_rank(spectra: Mapping[str, np.ndarray], share: float) -> float:
  """Computes how many directions hold a share of the energy of an update.

  Args:
    spectra: Squared singular values by leaf, [num_matrices, rank], descending.
    share: Share of the energy, above 0 and at most 1.

  Returns:
    The mean over all matrices of all leaves.
  """
  counts = []
  for spectrum in spectra.values():
    total = spectrum.sum(axis=-1, keepdims=True)
    reached = np.cumsum(spectrum, axis=-1) >= share * total * (1 - 1e-6)
    count = np.argmax(reached, axis=-1) + 1
    counts.append(np.where(total[..., 0] > 0, count, 0))
  return float(np.concatenate(counts).mean())
