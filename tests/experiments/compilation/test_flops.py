"""The counter of products is right where the count is plain."""

import jax
import jax.numpy as jnp
import pytest

from experiments.compilation.flops import product_flops

A, B = jnp.ones((3, 5)), jnp.ones((5, 7))
ONE_PRODUCT = 2 * 3 * 5 * 7


def flops(function, *args, **options):
  return product_flops(
    jax.jit(function).lower(*args).compile().as_text(), **options
  )


def test_a_product_is_two_operations_for_every_pair_of_factors():
  assert flops(lambda a, b: jnp.sin(a @ b), A, B) == ONE_PRODUCT
  batched = jnp.ones((4, 3, 5)), jnp.ones((4, 7, 5))
  product = lambda a, b: jnp.einsum("bik,bjk->bij", a, b)  # noqa: E731
  assert flops(product, *batched) == 4 * ONE_PRODUCT


def test_products_in_loops_count_as_often_as_they_run():
  def nested(a, b):
    def outer(total, _):
      def inner(total, _):
        return total + jnp.sin(total @ b @ b.T), None

      total, _ = jax.lax.scan(inner, total, length=4)
      return jnp.cos(total @ b @ b.T), None

    return jax.lax.scan(outer, a, length=6)[0]

  assert flops(nested, A, B) == 6 * (4 + 1) * 2 * ONE_PRODUCT


def test_a_loop_of_unknown_length_must_be_given_one():
  def some(a, b, rounds):
    body = lambda _, x: jnp.sin(x @ b @ b.T)  # noqa: E731
    with jax.named_scope("some"):
      return jax.lax.fori_loop(0, rounds, body, a)

  rounds = jnp.int32(3)
  with pytest.raises(ValueError, match="some/while: rounds of branch=None"):
    flops(some, A, B, rounds)
  counted = flops(
    some, A, B, rounds, rounds=lambda name, _: 5.0 * ("/some/" in name)
  )
  assert counted == 5 * 2 * ONE_PRODUCT


@pytest.mark.parametrize("count", [2, 3])
def test_branches_count_by_their_share(count):
  def chosen(a, b, which):
    x = jnp.sin(a)
    products = [
      lambda: x,
      lambda: jnp.sin(x @ b @ b.T),
      lambda: jnp.sin(jnp.sin(x @ b @ b.T) @ b @ b.T),
    ]
    return jax.lax.switch(which, products[:count])

  def rounds(name, branch):
    assert name.endswith("cond")
    return [0.5, 0.25, 0.125][branch]

  expected = (0.25 + 2 * 0.125 * (count == 3)) * 2 * ONE_PRODUCT
  assert flops(chosen, A, B, jnp.int32(1), rounds=rounds) == expected
