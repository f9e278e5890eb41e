"""The rank of an averaged update, from its squared singular values.

Low-rank factors carry the spectrum of what they send: with an orthonormal
left factor, the singular values of the right one are those of the product.
Two measures of the rank are in use. The *energy rank* is the number of
directions that hold a given share of the squared norm. The *stable rank* is the
squared norm over the largest squared singular value; it is smoother, but hardly
sees a long tail. The spectrum (8, 1, 0.5, 0.5) has squared norm 10: its energy
rank is 3 for a share of 0.95 and 2 for 0.9, and its stable rank is 1.25.
"""

import heapq
from collections.abc import Mapping

import numpy as np

CRITERIA = ("energy", "stable")
Spectra = Mapping[str, np.ndarray]  # By path: [num_layers, rank], descending.


def spectra_of(grams: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Computes squared singular values from the products of factors' columns.

  Args:
    grams: Gram matrices by path, [num_layers, rank, rank], with zeros beyond
      the rank in use.

  Returns:
    Spectra by path, [layers in use, rank in use], descending. Layers of zeros,
    which fill up short fragments, are left out, and so are leaves that have
    no other layers.
  """
  spectra = {}
  for path, gram in grams.items():
    is_used = np.diagonal(gram, 0, 1, 2) != 0
    rank = int(np.count_nonzero(is_used.any(axis=0)))
    if rank:
      square = gram[is_used.any(axis=1), :rank, :rank].astype(np.float64)
      values = np.linalg.eigvalsh(square)
      spectra[path] = np.maximum(values[:, ::-1], 0)
  return spectra


def energy_rank(spectrum: np.ndarray, share: float) -> float:
  """Computes how many directions hold a share of the energy.

  Args:
    spectrum: Squared singular values [num_matrices, rank], descending.
    share: Share of the energy, above 0 and at most 1.

  Returns:
    The mean over the matrices.
  """
  total = spectrum.sum(axis=-1, keepdims=True)
  reached = np.cumsum(spectrum, axis=-1) >= share * total * (1 - 1e-6)
  count = np.argmax(reached, axis=-1) + 1
  return float(np.where(total[..., 0] > 0, count, 0).mean())


def stable_rank(spectrum: np.ndarray) -> float:
  """Computes energy over the largest direction's, as a mean over matrices.

  Args:
    spectrum: Squared singular values [num_matrices, rank], descending.
  """
  largest = spectrum[..., 0]
  rank = spectrum.sum(axis=-1) / np.where(largest > 0, largest, 1)
  return float(rank.mean())


def measured_rank(spectra: Spectra, criterion: str, share: float) -> float:
  """Computes the rank of a whole update, the mean over all its matrices.

  Args:
    spectra: Squared singular values by leaf.
    criterion: "energy" or "stable".
    criterion: One of `CRITERIA`.
    share: Share of the energy that the energy rank must hold.
  """
  counts = [len(spectrum) for spectrum in spectra.values()]
  ranks = [
    energy_rank(spectrum, share)
    if criterion == "energy"
    else stable_rank(spectrum)
    for spectrum in spectra.values()
  ]
  return float(np.average(ranks, weights=counts))


def leaf_ranks(
  spectra: Spectra,
  bytes_per_rank: Mapping[str, float | int],
  budget_bytes: float | int,
  max_ranks: Mapping[str, int],
  step: int = 4,
) -> dict[str, int]:
  """Divides bytes among leaves so that the error is lowest.

  The error of a truncated matrix is the energy of the directions left out. So
  directions are taken in the order of their energy for each byte until the
  budget is spent. As spectra fall, no other division has a lower error, up to
  the step. Directions beyond those measured are extrapolated geometrically.

  Args:
    spectra: Squared singular values by leaf, [num_layers, rank].
    bytes_per_rank: Bytes of one more direction, by leaf.
    budget_bytes: Bytes of all leaves together.
    max_ranks: Most directions that a leaf may have, by leaf.
    step: Directions taken at a time, and the fewest that a leaf has (count).

  Returns:
    Ranks by leaf.
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
  """Continues a falling curve at the rate of its last half."""
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
