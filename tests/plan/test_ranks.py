import numpy as np
import pytest

from dilocox_jax.plan.ranks import (
  energy_rank,
  mean_rank,
  spectra_of,
  stable_rank,
)


def flat(rank, width, num_matrices=2):
  """Spectra of matrices with equal directions."""
  spectrum = np.zeros((num_matrices, width))
  spectrum[:, :rank] = 3.0
  return spectrum


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_equal_directions_are_counted_by_both_measures(rank):
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
  for rank_of in lambda each: energy_rank(each, 1.0), stable_rank:
    assert mean_rank(spectra, rank_of) == 5


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
