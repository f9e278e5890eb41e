"""Adaptive compression: chooses the rank and the length H of the next rounds.

The codec sends low-rank factors. The *energy rank* of an averaged update is the
smallest number of singular directions that hold a given share of its squared
norm. For example, the squared singular values (8, 1, 0.5, 0.5) have the sum 10.
Their energy rank is 3 for a share of 0.95 and 2 for a share of 0.9.

The mean energy rank of some rounds sets the rank of the next rounds. Each rank
needs a compiled program of its own, so the rank is chosen from a short list,
the *ladder*. A message of a smaller rank takes less time. So in the mode
"rank_and_interval", H (inner steps of a round) shrinks in proportion to the
bytes.

Example: with a first rank of 16 the ladder is 16, 10, 6, 3, 2. The mean energy
rank is 8. A tenth of the next rank should stay unused, so this rank must be at
least 8 / 0.9 = 8.9, and is 10. If an exchange at rank 10 has 0.65 times the
bytes of an exchange at rank 16, H = 30 becomes ceil(30 x 0.65) = 20.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

# What adapts: nothing, the rank alone, or the rank and H.
MODES = ("off", "rank", "rank_and_interval")
# An update whose energy rank is close to the rank of the factors may have more
# directions that were not sent. So the next rank is chosen such that at least a
# tenth of it stays unused.
_USED_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class RoundSetting:
  """Rank and H of the rounds up to the next change.

  Attributes:
    rank: Rank of the low-rank factors. 0: the codec has no factors.
    sync_interval: H, the number of inner steps of a round.
  """

  rank: int
  sync_interval: int


@dataclasses.dataclass(frozen=True)
class Policy:
  """Chooses the rank and the H of the next rounds from measurements.

  H is the number of inner steps of a round.

  Source: DiLoCoX, arXiv 2506.21263, Algorithm 3 (cited from memory): r_t is
  the mean effective rank over some rounds, H_t = H_1 r_t / r_1.
  Differs: ranks are chosen from a ladder; H follows the bytes, which are not
  quite proportional to the rank.

  Attributes:
    first: Setting of the first rounds: the largest rank and the largest H.
    mode: What adapts: "off" (nothing), "rank", or "rank_and_interval" (rank and
      H).
    window_rounds: Number of rounds that are measured before each new setting.
    energy: An update's rank is the smallest number of directions that hold this
      share of its squared norm (`energy_rank`).
  """

  first: RoundSetting
  mode: str = "rank"
  window_rounds: int = 5
  energy: float = 0.95

  @property
  def ladder(self) -> tuple[int, ...]:
    """The ranks that can be chosen, from the largest, `first.rank`, downward.

    They are five ranks with the same ratio between neighbors, down to an eighth
    of the first rank. They are rounded, at least 1, and equal ones count once.
    Examples: 16, 10, 6, 3, 2 and 4, 3, 2, 1. The first rank must not be 0.
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
    """Returns the rank and the H of the next rounds.

    The mean measured rank is divided by 0.9. The new rank is the lowest one of
    the ladder that is not below the quotient. If there is none, it is the
    largest one of the ladder. H differs from the first H only in the mode
    "rank_and_interval". In the mode "off" do not call this method, because it
    does not check the mode.

    Args:
      measured: Energy ranks of averaged updates (`energy_rank`), one for each
        exchange of the measured rounds. It must not be empty.
      bytes_of: Function from a rank to the bytes that an exchange sends.
    """
    ladder = self.ladder
    needed = sum(measured) / len(measured) / _USED_SHARE
    rank = min([rank for rank in ladder if rank >= needed], default=ladder[0])
    interval = self.first.sync_interval
    if self.mode == "rank_and_interval":
      # H is proportional to the bytes, rounded up: an exchange of 0.65 times
      # the bytes turns H = 30 into 20.
      share = bytes_of(rank) / bytes_of(ladder[0])
      interval = max(1, math.ceil(interval * share))
    return RoundSetting(rank, interval)


def spectra_of(grams: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Computes the squared singular values of updates from Gram matrices.

  An update is the product of an orthonormal left factor and a right factor. The
  eigenvalues of the right factor's Gram matrix are the squared singular values
  of the update.

  Args:
    grams: Gram matrices of the right factors by path of a leaf, [num_layers,
      rank, rank]. Unused rows and columns are zero. Arrays that do not have
      three axes are left out.

  Returns:
    Squared singular values by path, [layers in use, rank in use], descending.
    Layers of zeros, and leaves that have only such layers, are left out.
  """
  spectra = {}
  # A layer or a column is in use if the diagonal has an entry there that is not
  # zero.
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
  """Computes how many singular directions hold a share of an update's energy.

  The energy of a matrix is the sum of its squared singular values. For example,
  the squared singular values 8, 1, 0.5 and 0.5 need two directions for a share
  of 0.9, and three for a share of 0.95.

  Args:
    spectra: Squared singular values by path of a leaf, [num_matrices, rank],
      descending.
    share: Share of the energy, above 0 and at most 1.

  Returns:
    Mean number of directions over all matrices of all leaves. A matrix of zeros
    counts as 0.

  Raises:
    ValueError: If there are no spectra.
  """
  counts = []
  for spectrum in spectra.values():
    total = spectrum.sum(axis=-1, keepdims=True)
    # Without the tolerance, rounding could ask for one direction too many.
    reached = np.cumsum(spectrum, axis=-1) >= share * total * (1 - 1e-6)
    count = np.argmax(reached, axis=-1) + 1
    counts.append(np.where(total[..., 0] > 0, count, 0))
  return float(np.concatenate(counts).mean())
