"""The rank of an averaged update, from its squared singular values.

Low-rank factors carry the spectrum of what they send: with an orthonormal
left factor, the singular values of the right one are those of the product.
The *energy rank*, which adaptive runs follow, is the number of directions that
hold a given share of the squared norm. The *stable rank*, which is recorded
only, is the squared norm over the largest squared singular value; it is
smoother, but hardly sees a long tail. The spectrum (8, 1, 0.5, 0.5) has squared
norm 10: its energy rank is 3 for a share of 0.95 and 2 for 0.9, and its stable
rank is 1.25.
"""

from collections.abc import Callable, Mapping

import numpy as np

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


def mean_rank(
  spectra: Spectra, rank_of: Callable[[np.ndarray], float]
) -> float:
  """Computes the rank of a whole update, the mean over all its matrices.

  Args:
    spectra: Squared singular values by leaf.
    rank_of: Mean rank of a leaf's matrices, e.g. `stable_rank`.
  """
  counts = [len(spectrum) for spectrum in spectra.values()]
  ranks = [rank_of(spectrum) for spectrum in spectra.values()]
  return float(np.average(ranks, weights=counts))
