import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.codecs.base import Reduced
from dilocox_jax.codecs.sparse import RandomMask, TopK, stratum_bounds
from dilocox_jax.coroutines import as_function
from tests.codecs.alone import KEY, alone, gaussian, through
from tests.oracles import codecs as oracle

SHAPE = 2, 4, 45  # blocks of 60, three a layer


@pytest.mark.parametrize("indices", ["packed", "bitmap"])
def test_top_k_keeps_exactly_what_its_plain_twin_keeps(indices):
  values = gaussian(SHAPE)
  found, (places, _) = through(TopK(0.15, 70, indices), values)
  blocks = values.reshape(6, 60)
  twins = [oracle.largest(block, 9) for block in blocks]
  expected = np.stack([sparse for _, sparse in twins])
  assert np.array_equal(np.asarray(found).reshape(6, 60), expected)
  bits = np.unpackbits(np.asarray(places).reshape(6, -1), axis=-1)
  for row, (chosen, _) in zip(bits, twins, strict=True):
    if indices == "bitmap":
      assert np.flatnonzero(row[:60]).tolist() == chosen
    else:
      digits = row[: 9 * 6].reshape(9, 6)
      assert (digits @ (1 << np.arange(6))).tolist() == chosen


@pytest.mark.parametrize("width", [2, 5, 300, 4096, 70_000])
def test_indices_take_as_few_bits_as_they_need(width):
  values = gaussian((1, width))
  count = max(1, width // 100)
  _, (places, _) = through(TopK(count / width, width), values)
  chosen, _ = oracle.largest(values[0], count)
  num_bits = {2: 1, 5: 3, 300: 9, 4096: 12, 70_000: 17}[width]
  digits = np.asarray(chosen)[:, None] >> np.arange(num_bits) & 1
  assert np.array_equal(np.ravel(places), np.packbits(digits.ravel()))


def test_rounding_does_not_decide_which_of_equal_values_are_kept():
  rng = np.random.default_rng(0)
  sizes = np.float32(0.1 * (1 + 1e-6 * rng.normal(size=(6, 60))))
  values = (rng.choice([-1, 1], (6, 60)) * sizes).astype(np.float32)
  found, _ = through(TopK(0.15, 70), values.reshape(SHAPE))
  expected = np.where(np.arange(60) < 9, values, 0)
  assert np.array_equal(np.asarray(found).reshape(6, 60), expected)


AWKWARD = {
  "nothing": np.zeros(60),
  "one value": np.eye(60)[17],
  "fewer than are kept": np.where(np.arange(60) % 9 == 4, -2.0, 0.0),
  "signs": np.tile([3.0, -3.0, 1.0], 20),
  "far apart": np.float32(10.0) ** (np.arange(60) * 1.2 - 36),
  "the smallest kept one many times": np.repeat([5.0, 4.0, -4.0, 1.0], 15),
}


@pytest.mark.parametrize("values", AWKWARD.values(), ids=AWKWARD.keys())
@pytest.mark.parametrize("count", [1, 9, 20, 60])
def test_awkward_values_are_selected_as_by_a_plain_sort(values, count):
  values = values.astype(np.float32)
  codec = TopK(count / 60, 60, "bitmap")
  found, (bitmap, kept) = through(codec, values[None])
  chosen, expected = oracle.largest(values, count)
  bits = np.unpackbits(np.asarray(bitmap).ravel())[:60]
  assert np.flatnonzero(bits).tolist() == chosen
  assert np.asarray(kept).size == count
  assert np.array_equal(np.asarray(found).ravel(), expected)


@pytest.mark.parametrize(
  "size, fraction", [(1, 1.0), (7, 0.01), (7, 0.75), (360, 0.3), (360, 0.999)]
)
def test_a_mask_keeps_its_share_of_different_places(fraction, size):
  values = np.arange(1, 2 * size + 1, dtype=np.float32).reshape(2, size)
  found, (sent,) = through(RandomMask(fraction), values)
  kept = max(1, round(fraction * size))
  assert sent.size == 2 * kept
  # Every value is another, so that one drawn twice would be missed here.
  assert np.count_nonzero(found, axis=-1).tolist() == [kept, kept]
  assert np.array_equal(found[found > 0], values[found > 0])


def test_every_value_has_the_same_chance_and_layers_are_drawn_apart():
  draws = 400
  ones = jnp.ones((2, 64), jnp.float32)
  draw = jax.jit(
    jax.vmap(lambda key: alone(RandomMask(0.25), [ones], key=key)[0][0])
  )
  chosen = np.asarray(draw(jax.random.split(KEY, draws))) != 0
  share = chosen.mean(0)
  # 128 shares of 400 draws: the largest of as many normals is about 2.8.
  error = np.sqrt(0.25 * 0.75 / draws)
  assert np.max(np.abs(share - 0.25)) < 5 * error
  assert np.any(chosen[:, 0] != chosen[:, 1])


def test_the_mean_and_the_own_part_return_to_the_places_they_came_from():
  values = jnp.arange(1.0, 25.0, dtype=jnp.float32).reshape(1, 4, 6)

  def reduce(leaves):
    yield leaves
    return Reduced([leaves[0] + 100], leaves)

  run = as_function(RandomMask(0.5).run)
  ([mean], [own]), _ = run([values], [()], KEY, reduce)
  is_drawn = np.asarray(own) > 0
  assert np.array_equal(own[is_drawn], values[is_drawn])
  assert np.array_equal(mean[is_drawn], values[is_drawn] + 100)
  assert np.all(np.asarray(mean)[~is_drawn] == 0)


@pytest.mark.parametrize(
  ("size", "count"),
  [(10, 3), (7, 7), (5, 1), (16_384, 1638), (10_000_019, 9_000_017)],
)
def test_strata_cover_the_values_in_whole_lengths(size, count):
  bounds = np.asarray(
    jax.jit(stratum_bounds, static_argnums=(0, 1))(size, count)
  )
  exact = np.arange(count + 1, dtype=np.int64) * size // count
  np.testing.assert_array_equal(bounds, exact)
