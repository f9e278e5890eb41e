import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.models import fused_attention
from dilocox_jax.models.attention import attend, wide_einsum
from dilocox_jax.models.fused_attention import named_attention, splash_attention
from dilocox_jax.plan.choices import ATTENTIONS

# Weights from 256 keys, added up in another order.
TOLERANCE = 2e-5
WAYS = {
  "blockwise": named_attention("blockwise"),
  "splash": functools.partial(splash_attention, interpret=True),
}


def drawn(length=256, heads=4, shared=2, dtype=jnp.float32):
  query, *rest = jax.random.split(jax.random.key(0), 3)
  key, value = (
    jax.random.normal(key, (2, length, shared, 16), dtype) for key in rest
  )
  return jax.random.normal(query, (2, length, heads, 16), dtype), key, value


def documents(length=256):
  ends = jax.random.bernoulli(jax.random.key(1), 0.05, (2, length))
  return jnp.cumsum(ends, axis=1, dtype=jnp.int32)


def with_gradients(attention, arrays, segments):
  """The result, and gradients of a loss to which every value counts."""
  weights = jnp.cos(jnp.arange(arrays[0].size, dtype=jnp.float32))

  def loss(*arrays):
    mixed = attention(*arrays, segments)
    return jnp.sum(mixed.astype(jnp.float32).reshape(-1) * weights), mixed

  return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)


@pytest.mark.parametrize("segments", [None, documents()], ids=["one", "packed"])
@pytest.mark.parametrize("name", WAYS)
def test_every_way_computes_what_plain_attention_does(
  name, segments, monkeypatch
):
  monkeypatch.setattr(fused_attention, "_BLOCK", 64)
  found = with_gradients(WAYS[name], drawn(), segments)
  wanted = with_gradients(named_attention("plain"), drawn(), segments)
  chex.assert_trees_all_close(found, wanted, atol=TOLERANCE)


def test_blocks_sum_gradients_in_single_precision(monkeypatch):
  monkeypatch.setattr(fused_attention, "_BLOCK", 1)
  arrays = drawn(dtype=jnp.bfloat16)
  found, _ = with_gradients(WAYS["blockwise"], arrays, None)
  wide = tuple(x.astype(jnp.float32) for x in arrays)
  wanted, _ = with_gradients(named_attention("plain"), wide, None)
  error = jnp.abs(found[2].astype(jnp.float32) - wanted[2])
  # The sum of 256 blocks in bfloat16 would be off by more than 0.03.
  assert jnp.max(error) < 0.02 * jnp.max(jnp.abs(wanted[2]))


def test_a_length_that_no_block_divides_is_cut_into_smaller_ones(monkeypatch):
  # The end of a held-out text may have any length.
  monkeypatch.setattr(fused_attention, "_BLOCK", 10)
  arrays = drawn(length=14)
  wanted = named_attention("plain")(*arrays)
  for name in ("blockwise", "splash"):
    found = named_attention(name)(*arrays)
    chex.assert_trees_all_close(found, wanted, atol=TOLERANCE)
  assert all(callable(named_attention(n)) for n in ATTENTIONS if n != "auto")


def test_a_kernel_that_does_not_fit_is_refused_in_one_line():
  arrays = drawn(dtype=jnp.bfloat16)
  with pytest.raises(ValueError, match="data.document_masks=False"):
    named_attention("cudnn")(*arrays, documents())
  with pytest.raises(ValueError, match="model.compute_dtype=bfloat16"):
    named_attention("cudnn")(*drawn())
  with pytest.raises(ValueError, match="multiple of 128 tokens, not 100"):
    splash_attention(*drawn(length=100))


def test_attention_survives_scores_whose_exponentials_overflow():
  query, key, value = drawn(length=5)
  assert jnp.all(jnp.isfinite(attend(1e4 * query, key, value)))


@pytest.mark.parametrize(
  ("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 0.2)]
)
def test_narrow_factors_have_wide_products_and_narrow_gradients(
  dtype, tolerance
):
  x, y = jax.random.normal(jax.random.key(0), (2, 64, 64)).astype(dtype)
  exact = x.astype(jnp.float32) @ y.astype(jnp.float32)
  wide = wide_einsum("ij,jk->ik", x, y)
  assert wide.dtype == jnp.float32
  np.testing.assert_allclose(wide, exact, atol=1e-4)

  def loss(x, y):
    return jnp.sum(jnp.sin(wide_einsum("ij,jk->ik", x, y)))

  def plain(x, y):
    return jnp.sum(jnp.sin(x.astype(jnp.float32) @ y.astype(jnp.float32)))

  text = jax.jit(jax.grad(loss, (0, 1))).lower(x, y).as_text()
  lines = [line for line in text.splitlines() if "dot_general" in line]
  square = f"tensor<64x64x{'f32' if dtype == jnp.float32 else 'bf16'}>"
  assert len(lines) == 3
  assert all(f"({square}, {square})" in line for line in lines)
  found, wanted = (jax.grad(f, (0, 1))(x, y) for f in (loss, plain))
  chex.assert_trees_all_close(found, wanted, atol=tolerance)
