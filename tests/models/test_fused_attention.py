import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.models import fused_attention
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
  monkeypatch.setattr(fused_attention, "_BLOCK", 10)
  arrays = drawn(length=14)
  found = WAYS["blockwise"](*arrays)
  chex.assert_trees_all_close(
    found, named_attention("plain")(*arrays), atol=TOLERANCE
  )


def test_every_listed_attention_has_a_function():
  assert all(callable(named_attention(n)) for n in ATTENTIONS if n != "auto")


def test_a_kernel_that_does_not_fit_is_refused_in_one_line():
  arrays = drawn(dtype=jnp.bfloat16)
  with pytest.raises(ValueError, match="data.document_masks=False"):
    named_attention("cudnn")(*arrays, documents())
  with pytest.raises(ValueError, match="model.compute_dtype=bfloat16"):
    named_attention("cudnn")(*drawn())
  with pytest.raises(ValueError, match="multiple of 128 tokens, not 100"):
    splash_attention(*drawn(length=100))


def test_the_end_of_a_held_out_text_may_have_any_length():
  arrays = drawn(length=100)
  np.testing.assert_array_equal(
    named_attention("splash")(*arrays), named_attention("blockwise")(*arrays)
  )
