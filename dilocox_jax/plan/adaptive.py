"""Adaptive compression: the rank and the H of the next rounds.

The rank of the averaged update is measured in every round. After some rounds
the mean of the measured ranks sets the next rank. Only a few ranks can be
chosen, the *ladder*, since every rank has a program of its own. H follows the
bytes: at the first rank a transfer takes no longer than H inner steps, and a
transfer at a smaller rank needs proportionally fewer steps to hide it. All
functions here are pure functions of the measurements, so a run that is resumed
goes on as if it had not been interrupted.

Low-rank factors have the spectrum of their product: if the left factor is
orthonormal, the singular values of the right factor are those of the product.
The *energy rank* is the number of directions that hold a given share of the
squared norm. For the spectrum of squared singular values (8, 1, 0.5, 0.5),
whose sum is 10, it is 3 for a share of 0.95 and 2 for a share of 0.9.

Example: with a first rank of 16 the ladder is 16, 10, 6, 3, 2. A measured mean
of 8 needs 8 / 0.9 = 8.9, so the next rank is 10. If an exchange at rank 10 has
0.65 times the bytes of an exchange at rank 16, H = 30 becomes
ceil(30 x 0.65) = 20.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

MODES = ("off", "rank", "rank_and_interval")
# An update whose energy rank is close to the rank of the factors may have more
# directions that were not sent. So the next rank is chosen such that a tenth of
# it stays unused.
_USED_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class RoundSetting:
  """Rank and H of some rounds.

  Attributes:
    rank: Rank of low-rank factors; 0: the codec has no factors.
    sync_interval: H (inner steps).
  """

  rank: int
  sync_interval: int


@dataclasses.dataclass(frozen=True)
class Policy:
  """Chooses the rank and the H of the next rounds from measurements.

  Source: DiLoCoX, arXiv 2506.21263, Algorithm 3 (recalled): r_t is the mean
  effective rank of a window, H_t = H_1 r_t / r_1.
  Differs: ranks are chosen from a ladder; H follows the bytes, which are not
  quite proportional to the rank.

  Attributes:
    first: The setting of the first rounds: the largest rank, and its H.
    mode: Which values adapt, one of `MODES`.
    window_rounds: Number of rounds that are measured before each new setting,
      c.
    energy: Share of the squared norm that the energy rank must hold.
  """

  first: RoundSetting
  mode: str = "rank"
  window_rounds: int = 5
  energy: float = 0.95

  @property
  def ladder(self) -> tuple[int, ...]:
    """The ranks that can be chosen, descending, from the first to an eighth.

    The ratio of neighbors is about the fourth root of 8, which is 1.68, so that
    there are five ranks.
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
    """Returns the lowest rank that holds the measured energy ranks, and its H.

    A measured rank never exceeds the present rank. So a rank that is too small
    grows by one step of the ladder at a time.

    Args:
      measured: Energy rank of the averaged update, one value for each round.
      bytes_of: Function from a rank to the bytes of an exchange.
    """
    ladder = self.ladder
    needed = sum(measured) / len(measured) / _USED_SHARE
    rank = min([rank for rank in ladder if rank >= needed], default=ladder[0])
    interval = self.first.sync_interval
    if self.mode == "rank_and_interval":
      # The shortest H that hides a transfer as the first H did.
      share = bytes_of(rank) / bytes_of(ladder[0])
      interval = max(1, math.ceil(interval * share))
    return RoundSetting(rank, interval)


def spectra_of(grams: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Computes the squared singular values of updates from Gram matrices.

  Args:
    grams: Gram matrices of the right factors by path, [num_layers, rank, rank].
      Rows and columns that are not in use are zero. Arrays with another number
      of axes are left out.

  Returns:
    Spectra by path, [layers in use, rank in use], descending. Layers of zeros,
    which fill up short fragments, are left out. So are leaves without any other
    layers.
  """
  spectra = {}
  for path, gram in grams.items():
    if np.ndim(gram) != 3:
      continue
    is_used = np.diagonal(gram, axis1=1, axis2=2) != 0
    layers = is_used.any(axis=1)
    columns = is_used.any(axis=0)
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
