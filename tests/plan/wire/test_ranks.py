import numpy as np
import pytest

from dilocox_jax.plan.wire.ranks import (
  energy_rank,
  leaf_ranks,
  measured_rank,
  spectra_of,
  stable_rank,
)


def flat(rank, width, num_matrices=2):
  """Spectra of matrices with equal directions."""
  spectrum = np.zeros((num_matrices, width))
  spectrum[:, :rank] = 3.0
  return spectrum


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_equal_directions_are_counted_by_both_criteria(rank):
  assert energy_rank(flat(rank, 8), 1.0) == rank
  assert stable_rank(flat(rank, 8)) == rank


def test_the_energy_rank_holds_its_share_and_no_fewer_directions_do():
  spectrum = np.array([[8.0, 4.0, 2.0, 1.0, 1.0]])
  assert [energy_rank(spectrum, s) for s in (0.5, 0.51, 0.75, 0.9, 1.0)] == [
    1,
    2,
    2,
    4,
    5,
  ]
  assert stable_rank(spectrum) == 2.0


def test_matrices_without_energy_have_rank_zero():
  spectrum = np.stack([flat(4, 8)[0], np.zeros(8)])
  assert energy_rank(spectrum, 0.9) == 2
  assert stable_rank(spectrum) == 2


def test_leaves_count_by_their_matrices():
  spectra = {"one": flat(2, 8, 1), "three": flat(6, 8, 3)}
  for criterion in "energy", "stable":
    assert measured_rank(spectra, criterion, 1.0) == 5


def test_factors_give_the_spectrum_of_what_they_multiply_to():
  rng = np.random.default_rng(0)
  right = rng.normal(size=(2, 7, 3))
  basis = np.stack([np.linalg.qr(rng.normal(size=(9, 3)))[0]] * 2)
  padded = np.zeros((3, 5, 5))  # The last layer fills a fragment up.
  padded[:2, :3, :3] = right.transpose(0, 2, 1) @ right
  found = spectra_of({"w": padded, "unsent": np.zeros((3, 5, 5))})
  assert found.keys() == {"w"}
  values = np.linalg.svd(basis @ right.transpose(0, 2, 1), compute_uv=False)
  np.testing.assert_allclose(found["w"], values[:, :3] ** 2, rtol=1e-12)
  whole = {"w": padded[:2]}
  for criterion in "energy", "stable":
    expected = measured_rank(spectra_of(whole), criterion, 0.9)
    assert measured_rank(found, criterion, 0.9) == expected


def lost(spectra, ranks):
  return sum(spectra[path][:, rank:].sum() for path, rank in ranks.items())


def test_bytes_go_where_they_lower_the_error_most():
  falling = 0.5 ** np.arange(16.0)
  spectra = {
    "much": 100 * falling[None],
    "little": falling[None],
    "cheap": 10 * falling[None],
  }
  cost = {"much": 10.0, "little": 10.0, "cheap": 1.0}
  most = dict.fromkeys(cost, 16)
  budget = 6 * sum(cost.values())
  ranks = leaf_ranks(spectra, cost, budget, most, step=1)
  assert sum(cost[p] * ranks[p] for p in ranks) <= budget
  # No other division that the budget allows leaves less behind.
  best = min(
    lost(spectra, {"much": a, "little": b, "cheap": c})
    for a in range(1, 17)
    for b in range(1, 17)
    for c in range(1, 17)
    if 10 * a + 10 * b + c <= budget
  )
  assert lost(spectra, ranks) <= best * (1 + 1e-9)
  assert lost(spectra, ranks) < lost(spectra, dict.fromkeys(cost, 6))


def test_directions_beyond_the_measured_ones_are_extrapolated():
  spectra = {"flat": np.ones((1, 8)), "falling": 0.1 ** np.arange(8.0)[None]}
  cost = dict.fromkeys(spectra, 1.0)
  ranks = leaf_ranks(spectra, cost, 20, dict.fromkeys(cost, 16))
  assert ranks == {"flat": 16, "falling": 4}


def test_no_leaf_goes_beyond_its_limit():
  spectra = {"a": np.ones((1, 8)), "b": np.ones((1, 8))}
  cost = dict.fromkeys(spectra, 1.0)
  assert leaf_ranks(spectra, cost, 1000, {"a": 5, "b": 2}) == {"a": 5, "b": 2}
