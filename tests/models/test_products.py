import chex
import jax
import jax.numpy as jnp
import pytest

from dilocox_jax.models.products import wide_einsum


def factors(dtype):
  x, y = jax.random.normal(jax.random.key(0), (2, 64, 64), jnp.float32)
  return x.astype(dtype), y.astype(dtype)


def test_the_result_of_narrow_factors_is_not_rounded():
  x, y = factors(jnp.bfloat16)
  wide = wide_einsum("ij,jk->ik", x, y)
  exact = x.astype(jnp.float32) @ y.astype(jnp.float32)
  assert wide.dtype == jnp.float32
  chex.assert_trees_all_close(wide, exact, atol=1e-4)
  assert jnp.max(jnp.abs((x @ y).astype(jnp.float32) - exact)) > 1e-2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_products_of_the_factors_dtype(dtype):
  x, y = factors(dtype)

  def loss(x, y):
    return jnp.sum(jnp.sin(wide_einsum("ij,jk->ik", x, y)))

  def plain(x, y):
    return jnp.sum(jnp.sin(x.astype(jnp.float32) @ y.astype(jnp.float32)))

  text = jax.jit(jax.grad(loss, (0, 1))).lower(x, y).as_text()
  kind = {"float32": "f32", "bfloat16": "bf16"}[jnp.dtype(dtype).name]
  lines = [line for line in text.splitlines() if "dot_general" in line]
  square = f"tensor<64x64x{kind}>"
  assert len(lines) == 3
  assert all(f"({square}, {square})" in line for line in lines)
  rounding = 1e-5 if dtype == jnp.float32 else 0.2
  found = jax.grad(loss, (0, 1))(x, y)
  wanted = jax.grad(plain, (0, 1))(x, y)
  chex.assert_trees_all_close(found, wanted, atol=rounding)
