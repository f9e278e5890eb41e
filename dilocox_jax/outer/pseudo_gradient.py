"""The sign of the pseudo-gradient, and nothing else.

Optax subtracts what it is given, so the outer gradient must point from where
the replica is to where it started: outer minus inner. Every other file asks
here.
"""

import jax
import jax.numpy as jnp

from dilocox_jax.pytypes import Tree


def pseudo_gradient(outer: Tree, inner: Tree) -> Tree:
  """The outer gradient of a replica, outer minus inner.

  Args:
    outer: Outer parameters.
    inner: The replica's parameters, same structure and shapes.

  Source: Douillard et al., 2023, arXiv 2311.08105, Algorithm 1, line 8.
  """
  return jax.tree.map(jnp.subtract, outer, inner)
