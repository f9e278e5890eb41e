"""Products of narrow values whose results are wide."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def wide_einsum(
  equation: str, x: Float[Array, "..."], y: Float[Array, "..."]
) -> Float[Array, "..."]:
  """Returns `jnp.einsum` of two arrays with a result in fp32 or wider.

  Devices add up products of bfloat16 values in fp32 anyway, so the result need
  not be rounded. The gradients are products of two arrays again, one of which
  is the gradient of the result. It is rounded to the dtype of the other one
  first, because a product of fp32 and bfloat16 would be computed in fp32, at a
  fraction of the speed.

  Args:
    equation: Equation of the einsum.
    x: First factor.
    y: Second factor, with the dtype of the first.
  """
  wide = np.promote_types(np.float32, x.dtype)
  if x.dtype == wide:
    return jnp.einsum(equation, x, y, preferred_element_type=wide)
  return _widened(equation, x, y)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _widened(equation, x, y):
  return jnp.einsum(equation, x, y, preferred_element_type=np.float32)


def _widened_forward(equation, x, y):
  return _widened(equation, x, y), (x, y)


def _widened_backward(equation, factors, gradient):
  _, pullback = jax.vjp(functools.partial(jnp.einsum, equation), *factors)
  return pullback(gradient.astype(factors[0].dtype))


_widened.defvjp(_widened_forward, _widened_backward)
