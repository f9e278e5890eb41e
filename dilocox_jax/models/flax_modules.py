"""Makes a `LossModel` of a module that somebody wrote in Flax.

A module reads tokens [B, L] and returns logits [B, L, V]. Its parameters become
a nested dict of arrays, which is what optimizers, codecs and checkpoints take.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jaxtyping import Array, Int

from dilocox_jax.checks import require
from dilocox_jax.models.loss import LossModel, token_loss

# (nnx.Rngs) -> module in NNX.
MakeModule = Callable[[nnx.Rngs], nnx.Module]


def as_loss_model(model: LossModel | linen.Module | MakeModule) -> LossModel:
  """Returns a model as its parameters and its loss.

  Args:
    model: A `LossModel`, which is returned as it is; a module in linen; or, for
      NNX, a function from `nnx.Rngs` to a module, such as its class.

  Raises:
    ValueError: One line, if it is none of these, or the module has state that
      is no parameter, e.g. running means or random numbers.
  """
  if isinstance(model, LossModel):
    return model
  if isinstance(model, linen.Module):
    return _of_linen(model)
  require(
    callable(model) and not isinstance(model, nnx.Module),
    f"a model of the type {type(model).__name__} cannot be trained: hand in a "
    "dilocox_jax.LossModel, a linen module, or a function from nnx.Rngs to an "
    "NNX module, e.g. its class",
  )
  return _of_nnx(model)


def _of_linen(module: linen.Module) -> LossModel:
  def init(key: Array) -> Any:
    variables = dict(module.init(key, jnp.zeros((1, 1), np.int32)))
    params = variables.pop("params", {})
    _check_state(variables)
    return params

  def apply(params: Any, tokens: Array) -> Any:
    return module.apply({"params": params}, tokens)

  jax.eval_shape(init, jax.random.key(0))  # A module that fails does so now.
  return _with_loss(init, apply)


def _of_nnx(make: MakeModule) -> LossModel:
  abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
  graph, pattern, rest = nnx.split(abstract, nnx.Param, ...)
  _check_state(nnx.to_pure_dict(rest))

  def init(key: Array) -> Any:
    params = nnx.state(make(nnx.Rngs(key)), nnx.Param)
    return _with_text_keys(nnx.to_pure_dict(params))

  def apply(params: Any, tokens: Array) -> Array:
    state = jax.tree.map(lambda leaf: leaf, pattern)
    own_keys = _with_own_keys(nnx.to_pure_dict(pattern), params)
    nnx.replace_by_pure_dict(state, own_keys)
    module: Any = nnx.merge(graph, state)
    return module(tokens)

  return _with_loss(init, apply)


def _with_loss(
  init: Callable[[Array], Any], apply: Callable[[Any, Array], Array]
) -> LossModel:
  def loss(params: Any, tokens_BxS: Int[Array, "B S"]) -> Array:
    logits = apply(params, tokens_BxS[:, :-1])
    logits = logits.astype(np.promote_types(np.float32, logits.dtype))
    targets_T = tokens_BxS[:, 1:].reshape(-1)
    return token_loss(logits.reshape(targets_T.size, -1), targets_T)

  return LossModel(init, loss)


def _check_state(others: dict[str, Any]) -> None:
  require(
    not others,
    f"the module has state that is no parameter ({', '.join(map(str, others))})"
    ": a loss must be a function of parameters and tokens alone",
  )


def _with_text_keys(tree: Any) -> Any:
  """Returns a nested dict with text for the numbers that lists have as keys."""
  if not isinstance(tree, dict):
    return tree
  return {str(key): _with_text_keys(value) for key, value in tree.items()}


def _with_own_keys(pattern: Any, tree: Any) -> Any:
  """Reverses `_with_text_keys`, given a nested dict with the first keys."""
  if not isinstance(pattern, dict):
    return tree
  return {
    key: _with_own_keys(value, tree[str(key)]) for key, value in pattern.items()
  }
