import jax
import jax.numpy as jnp
import numpy as np
import optax

from dilocox_jax.outer.rules import pseudo_gradient

OUTER = {"a": jnp.asarray([1.0, -2.0]), "b": {"c": jnp.float32(0.5)}}
INNER = {"a": jnp.asarray([4.0, 0.25]), "b": {"c": jnp.float32(-1.5)}}


def test_plain_descent_at_rate_one_leads_to_the_replica():
  # Optax subtracts: a wrong sign would lead away from it.
  optimizer = optax.sgd(1.0)
  updates, _ = optimizer.update(
    pseudo_gradient(OUTER, INNER), optimizer.init(OUTER)
  )
  reached = optax.apply_updates(OUTER, updates)
  jax.tree.map(np.testing.assert_array_equal, reached, INNER)


def test_a_replica_that_did_not_move_has_none():
  zeros = jax.tree.map(jnp.zeros_like, OUTER)
  jax.tree.map(
    np.testing.assert_array_equal, pseudo_gradient(OUTER, OUTER), zeros
  )
