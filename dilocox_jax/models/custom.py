"""Makes a `LossModel` of a model that somebody has: any module, or functions.

A loss is a function (model, batch) -> scalar, in which the model is the module
or, for functions, the model with its parameters. Without one, batches are
tokens, and the loss is the cross-entropy of each token given those before it.
The parameters become a nested dict of arrays.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from jaxtyping import Array, Int

from dilocox_jax.checks import require
from dilocox_jax.models.loss import LossModel, token_loss
from dilocox_jax.models.transformer import bound_module
from dilocox_jax.trees import Tree, leaves_by_path, nested

MakeModule = Callable[[nnx.Rngs], nnx.Module]
ModelLoss = Callable[[Any, Any], Array]


def cross_entropy(model: Callable, tokens_BxS: Int[Array, "B S"]) -> Array:
  """Computes the mean cross-entropy of each token given those before it.

  Args:
    model: Function from tokens [B, L] to logits [B, L, V].
    tokens_BxS: Sequences of S = L + 1 tokens.
  """
  logits = model(tokens_BxS[:, :-1])
  logits = logits.astype(np.promote_types(np.float32, logits.dtype))
  targets_T = tokens_BxS[:, 1:].reshape(-1)
  return token_loss(logits.reshape(targets_T.size, -1), targets_T)


def as_loss_model(
  model: Any,
  loss: ModelLoss | None = None,
  example: Callable[[], Tree] = lambda: np.zeros((1, 2), np.int32),
) -> LossModel:
  """Returns a model as its parameters and its loss.

  Args:
    model: A `LossModel`; a module of NNX, linen or Equinox; a function from
      `nnx.Rngs` to a module of NNX, such as its class; or a pair of functions,
      (init, loss), or (init, apply) if a loss is given. They are (key) ->
      parameters, (parameters, batch) -> scalar, and (parameters, inputs) ->
      outputs.
    loss: Function (model, batch) -> scalar; None: batches are tokens.
    example: Function that returns a batch, which linen needs for its init.

  Raises:
    ValueError: One line, if it is none of these, or a module has state that is
      no parameter, e.g. running means or random numbers.
  """
  if isinstance(model, LossModel):
    require(loss is None, "loss: the model that is handed in has one already")
    return model
  if isinstance(model, tuple) and len(model) == 2:
    init, function = model
    if loss is None:
      return LossModel(init, function)
    return _with(loss, init, lambda p: functools.partial(function, p))
  if loss is None:
    return _with_logits(_of_module(model, cross_entropy, example))
  return _of_module(model, loss, example)


def reads_tokens(model: Any, loss: ModelLoss | None) -> bool:
  """Whether a model that is handed in is trained to predict tokens.

  Args:
    model: Model as for `as_loss_model`; None is the config's own.
    loss: Loss as for `as_loss_model`.
  """
  has_loss = isinstance(model, LossModel | tuple) or loss is not None
  return not has_loss


def _with_logits(model: LossModel) -> LossModel:
  """Adds what a module returns for tokens."""

  def logits(params: Any, tokens_BxL: Array) -> Array:
    return model.module(params)(tokens_BxL)

  return model._replace(logits=logits)


def _of_module(
  model: Any, loss: ModelLoss, example: Callable[[], Tree]
) -> LossModel:
  """Returns a module, or a function that makes one, with its loss."""
  if isinstance(model, linen.Module):
    return _of_linen(model, loss, example)
  if isinstance(model, nnx.Module):
    return _of_nnx(lambda rngs: model, loss)
  if callable(model) and any(map(_is_trained, jax.tree.leaves(model))):
    return _of_tree(model, loss)
  require(
    callable(model),
    f"a model of type {type(model).__name__} cannot be trained: hand in a "
    "module of NNX, linen or Equinox, a function from nnx.Rngs to a module, or "
    "a pair (init, loss)",
  )
  make: Any = model
  return _of_nnx(make, loss)


def _with(
  loss: ModelLoss, init: Callable, module: Callable[[Tree], Any]
) -> LossModel:
  return LossModel(
    init, lambda params, batch: loss(module(params), batch), module
  )


def _of_linen(
  module: linen.Module, loss: ModelLoss, example: Callable[[], Tree]
) -> LossModel:
  # Drawn here and not in `init`, which JAX traces: data are somebody's code.
  batch = jax.tree.map(np.asarray, example())

  def init(key: Array) -> Any:
    variables = dict(
      module.init(key, jax.tree.map(jnp.asarray, batch), method=loss)
    )
    params = variables.pop("params", {})
    _check_state(variables)
    return params

  def bound_loss(params: Any, batch: Any) -> Any:
    return module.apply({"params": params}, batch, method=loss)

  jax.eval_shape(init, jax.random.key(0))  # A module that fails does so now.
  return LossModel(init, bound_loss, lambda p: module.bind({"params": p}))


def _of_nnx(make: MakeModule, loss: ModelLoss) -> LossModel:
  abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
  _, pattern, rest = nnx.split(abstract, nnx.Param, ...)
  _check_state(nnx.to_pure_dict(rest))
  pure, bound = nnx.to_pure_dict(pattern), bound_module(abstract)

  def init(key: Array) -> Any:
    params = nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key)), nnx.Param))
    return nested(leaves_by_path(params))

  return _with(loss, init, lambda params: bound(_with_leaves(pure, params)))


def _of_tree(model: Any, loss: ModelLoss) -> LossModel:
  """Takes a module that is a tree itself, as those of Equinox are."""
  leaves = leaves_by_path(model).items()
  trained = nested({path: x for path, x in leaves if _is_trained(x)})

  def init(key: Array) -> Any:
    del key  # Its numbers are drawn already.
    return trained

  return _with(loss, init, lambda params: _with_leaves(model, params))


def _with_leaves(tree: Any, params: Any) -> Any:
  """Returns a tree with the leaves of a nested dict, where that has them."""
  own = leaves_by_path(tree) | leaves_by_path(params)
  return jax.tree.unflatten(jax.tree.structure(tree), list(own.values()))


def _is_trained(leaf: Any) -> bool:
  return isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(
    leaf.dtype, jnp.inexact
  )


def _check_state(others: dict[str, Any]) -> None:
  require(
    not others,
    f"the module has state that is no parameter ({', '.join(map(str, others))})"
    ": a loss must be a function of parameters and a batch alone",
  )
