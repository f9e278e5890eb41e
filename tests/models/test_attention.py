import chex
import jax
import jax.numpy as jnp

from dilocox_jax.models.attention import attend, extended, rotate

# Angles of up to 30 radians are rounded to fp32 before their sine is taken.
ROTATION_TOLERANCE = 1e-5


def test_attention_depends_on_distances_alone():
  query, key = jax.random.normal(jax.random.key(0), (2, 2, 7, 2, 8))
  # The same items where they are and 20 positions later.
  pad = ((0, 0), (20, 0), (0, 0), (0, 0))
  products = []
  for widths in (((0, 0),) * 4, pad):
    q, k = (rotate(jnp.pad(x, widths))[:, -7:] for x in (query, key))
    products.append(jnp.einsum("blnk,bmnk->bnlm", q, k))
  chex.assert_trees_all_close(*products, atol=ROTATION_TOLERANCE)
  # And it does depend on them.
  still = jnp.einsum("blnk,bmnk->bnlm", query, key)
  assert not jnp.allclose(still, products[0], atol=0.1)


def test_attention_averages_the_past_when_all_keys_are_alike():
  query, _, value = jax.random.normal(jax.random.key(0), (3, 2, 7, 2, 8))
  key = jnp.ones_like(query)
  counts = jnp.arange(1.0, 8.0)[None, :, None, None]
  expected = jnp.cumsum(value, axis=1) / counts
  chex.assert_trees_all_close(attend(query, key, value), expected, atol=1e-6)


def test_attention_survives_scores_whose_exponentials_overflow():
  query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 8))
  mixed = attend(1e4 * query, key, value)
  assert jnp.all(jnp.isfinite(mixed))


def test_a_query_that_comes_later_reads_what_was_kept():
  query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 7, 2, 8))
  kept = {"key": jnp.zeros_like(key), "value": jnp.zeros_like(value)}
  for start, stop in ((0, 4), (4, 7)):
    new = {"key": key[:, start:stop], "value": value[:, start:stop]}
    kept = extended(kept, new, start)
    mixed = attend(query[:, start:stop], kept["key"], kept["value"], start)
    whole = attend(query, key, value)[:, start:stop]
    chex.assert_trees_all_close(mixed, whole, atol=1e-6)
