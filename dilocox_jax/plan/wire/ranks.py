"""How many directions an averaged update has, from its squared singular values.

Low-rank factors carry the spectrum of what they send: with an orthonormal
left factor, the singular values of the right one are those of the product.
Two readings of "the rank" are in use. The *energy rank* counts the directions
that hold a given share of the squared norm; it is what must be sent to lose no
more than the rest. The *stable rank*, squared norm over largest squared
singular value, is smoother but blind to a long tail.
"""

import heapq
from collections.abc import Mapping

import numpy as np

CRITERIA = ("energy", "stable")
Spectra = Mapping[str, np.ndarray]  # Path to [num_layers, rank], descending.


def spectra_of(grams: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Squared singular values of factors, from the products of their columns.

  Args:
    grams: Path to [num_layers, rank, rank]; zeros beyond the rank in use.

  Returns:
    Path to [layers in use, rank in use], descending. Layers of zeros, which
    fill short fragments up, are left out, and so are leaves of them alone.
  """
  found = {}
  for path, gram in grams.items():
    is_used = np.diagonal(gram, 0, 1, 2) != 0
    rank = int(np.count_nonzero(is_used.any(axis=0)))
    if rank:
      square = gram[is_used.any(axis=1), :rank, :rank].astype(np.float64)
      values = np.linalg.eigvalsh(square)
      found[path] = np.maximum(values[:, ::-1], 0)
  return found


def energy_rank(spectrum: np.ndarray, share: float) -> float:
  """Directions that hold a share of the energy, mean over matrices.

  Args:
    spectrum: Squared singular values [num_matrices, rank], descending.
    share: Of the energy, above 0 and at most 1.
  """
  total = spectrum.sum(axis=-1, keepdims=True)
  reached = np.cumsum(spectrum, axis=-1) >= share * total * (1 - 1e-6)
  count = np.argmax(reached, axis=-1) + 1
  return float(np.where(total[..., 0] > 0, count, 0).mean())


def stable_rank(spectrum: np.ndarray) -> float:
  """Energy over the largest direction's energy, mean over matrices."""
  largest = spectrum[..., 0]
  rank = spectrum.sum(axis=-1) / np.where(largest > 0, largest, 1)
  return float(rank.mean())


def measured_rank(spectra: Spectra, criterion: str, share: float) -> float:
  """One number for a whole update: the mean over all its matrices.

  Args:
    spectra: Squared singular values by leaf.
    criterion: "energy" or "stable".
    share: Of the energy.
  """
  counts = [len(each) for each in spectra.values()]
  ranks = [
    energy_rank(each, share) if criterion == "energy" else stable_rank(each)
    for each in spectra.values()
  ]
  return float(np.average(ranks, weights=counts))


def leaf_ranks(
  spectra: Spectra,
  bytes_per_rank: Mapping[str, float | int],
  budget_bytes: float | int,
  max_ranks: Mapping[str, int],
  step: int = 4,
) -> dict[str, int]:
  """Spends bytes where they lower the error most.

  The error of a truncated matrix is the energy of the directions left out, so
  directions are bought by energy a byte until the budget is spent; as spectra
  fall, no other division loses less, up to the step. Directions beyond those
  measured are extrapolated geometrically.

  Args:
    spectra: Squared singular values by leaf, [num_layers, rank].
    bytes_per_rank: What one more direction of a leaf costs (bytes).
    budget_bytes: For all leaves together.
    max_ranks: Directions that a leaf may have at most.
    step: Directions bought at a time, and the fewest a leaf has.

  Returns:
    Rank by leaf.
  """
  curves = {
    path: _extended(spectrum.sum(axis=0), max_ranks[path])
    for path, spectrum in spectra.items()
  }
  ranks = {path: min(step, max_ranks[path]) for path in spectra}
  left = budget_bytes - sum(bytes_per_rank[p] * ranks[p] for p in ranks)

  def gain(path: str) -> float:
    following = curves[path][ranks[path] : ranks[path] + step]
    return float(following.sum()) / (bytes_per_rank[path] * step)

  queue = [(-gain(path), path) for path in sorted(ranks)]
  heapq.heapify(queue)
  while queue:
    _, path = heapq.heappop(queue)
    more = min(step, max_ranks[path] - ranks[path])
    cost = more * bytes_per_rank[path]
    if more <= 0 or cost > left:
      continue
    ranks[path] += more
    left -= cost
    heapq.heappush(queue, (-gain(path), path))
  return ranks


def _extended(curve: np.ndarray, length: int) -> np.ndarray:
  """A falling curve continued at the rate of its last half."""
  curve = np.asarray(curve, np.float64)
  missing = length - len(curve)
  if missing <= 0:
    return curve[:length]
  middle, last = curve[len(curve) // 2], curve[-1]
  span = len(curve) - 1 - len(curve) // 2
  rate = 1.0
  if span and middle > 0:
    rate = min(1.0, float(last / middle) ** (1 / span))
  tail = last * rate ** np.arange(1, missing + 1)
  return np.concatenate([curve, tail])
