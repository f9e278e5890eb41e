import jax
import jax.numpy as jnp
import pytest

from dilocox_jax.models.remat import remat_wrapper
from dilocox_jax.models.transformer import build_model
from dilocox_jax.plan.choices import REMATS
from dilocox_jax.plan.model.presets import nano


@pytest.mark.parametrize("name", REMATS)
def test_every_listed_remat_has_a_wrapper_that_keeps_the_function(name):
  wrapped = remat_wrapper(name)(lambda x: 3.0 * x)
  assert float(jax.grad(wrapped)(2.0)) == 3.0


def saved_values(remat):
  """Values that the forward passes of all layers keep for the backward."""
  model = build_model(nano, remat=remat)
  assert model.stream is not None
  stream = model.stream
  tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0))

  def kept(params, tokens):
    run = lambda params: jnp.sum(stream(params, tokens))  # noqa: E731
    return jax.tree.leaves(jax.vjp(run, params)[1])

  return sum(x.size for x in jax.eval_shape(kept, params, tokens))


def test_a_model_keeps_less_the_more_it_computes_again():
  none, dots, full = map(saved_values, REMATS)
  assert none > 1.5 * dots > 1.5 * full
