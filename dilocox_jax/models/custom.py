"""Turns a user's model into a `LossModel`, a tuple of pure functions.

`as_loss_model` lists the forms that a model may have, such as a module of NNX,
linen or Equinox. A module without a loss is trained on tokens, by the
cross-entropy of each token given the tokens before it.
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
from dilocox_jax.distributed.partition_rules import PartitionRule
from dilocox_jax.models.loss import LossModel, token_loss
from dilocox_jax.models.random_loss import draws_random, reads_keyed_batch
from dilocox_jax.models.transformer import bound_module
from dilocox_jax.trees import Tree, leaves_by_path, nested

MakeModule = Callable[[nnx.Rngs], nnx.Module]
ModelLoss = Callable[..., Array]


def cross_entropy(model: Callable, tokens_BxS: Int[Array, "B S"]) -> Array:
  """Returns the mean cross-entropy of all tokens but the first, in nats.

  `model` maps the first S - 1 tokens [B, S - 1] to logits [B, S - 1, V], which
  predict the last S - 1 tokens.
  """
  logits = model(tokens_BxS[:, :-1])
  logits = logits.astype(np.promote_types(np.float32, logits.dtype))
  targets_T = tokens_BxS[:, 1:].reshape(-1)
  return token_loss(logits.reshape(targets_T.size, -1), targets_T)


def as_loss_model(
  model: Any,
  loss: ModelLoss | None = None,
  example: Callable[[], Tree] = lambda: np.zeros((1, 2), np.int32),
  partition: PartitionRule | None = None,
) -> LossModel:
  """Turns a user's model into a `LossModel`, a tuple of pure functions.

  Args:
    model: One of these:

      - A `LossModel`.
      - A module of NNX, linen or Equinox.
      - A function from `nnx.Rngs` to a module of NNX, e.g. the module's class.
      - A pair (init, loss) of functions (key) -> parameters and (parameters,
        batch) -> scalar.
      - A pair (init, apply) of functions (key) -> parameters and (parameters,
        inputs) -> outputs. It needs the argument `loss`.
    loss: Function (model, batch) -> scalar, or (model, batch, key) -> scalar if
      it draws random numbers. None: the model's own loss, or for a module the
      cross-entropy of tokens.
    example: Function that returns a batch. It is called only for a linen
      module, whose `init` needs a batch. The default returns two tokens.
    partition: (path, shape) -> partition of a parameter among the devices of a
      replica (`distributed.partition_rules`). None: a `LossModel` keeps its
      own, and a module of NNX or linen is divided as its partitioning metadata
      say. Without metadata, `LossModel.partition` is None.

  Raises:
    ValueError: One line, if the model is none of these, if `loss` is given for
      a `LossModel`, or if a module of NNX or linen has state that is not a
      parameter, e.g. running means or a stream of keys.
  """
  is_random = loss is not None and draws_random(loss)
  if is_random:
    loss = reads_keyed_batch(loss)
  loss_model = _loss_model_of(model, loss, example)
  if is_random:
    loss_model = loss_model._replace(draws_random=True)
  if partition is not None:
    loss_model = loss_model._replace(partition=partition)
  return loss_model


def _loss_model_of(
  model: Any, loss: ModelLoss | None, example: Callable[[], Tree]
) -> LossModel:
  """Turns a user's model into a `LossModel`, as `as_loss_model` does.

  A `loss` that draws random numbers must already read its key from the batch
  (`reads_keyed_batch`).
  """
  if isinstance(model, LossModel):
    require(loss is None, "loss: the model that is passed in has one already")
    return model
  if isinstance(model, tuple) and len(model) == 2:
    init, function = model
    if loss is None:
      # The pair is (init, loss).
      is_random = draws_random(function)
      return LossModel(
        init,
        loss=reads_keyed_batch(function) if is_random else function,
        draws_random=is_random,
      )
    # The pair is (init, apply).
    return _bound_loss_model(
      loss, init, module=lambda params: functools.partial(function, params)
    )
  if loss is None:
    return _with_logits(_of_module(model, cross_entropy, example))
  return _of_module(model, loss, example)


def reads_tokens(model: Any, loss: ModelLoss | None) -> bool:
  """Returns whether a model is trained on tokens, by their cross-entropy.

  That is so if `loss` is None and the model has no loss of its own. Only a
  `LossModel` and a pair have a loss of their own.

  Args:
    model: Any model that `as_loss_model` accepts; None: the model of the
      config.
    loss: Function (model, batch) -> scalar, or None.
  """
  has_loss = isinstance(model, LossModel | tuple) or loss is not None
  return not has_loss


def _with_logits(model: LossModel) -> LossModel:
  """Returns a copy of a model whose `logits` calls its module with tokens."""

  def logits(params: Any, tokens_BxL: Array) -> Array:
    return model.module(params)(tokens_BxL)

  return model._replace(logits=logits)


def _of_module(
  model: Any, loss: ModelLoss, example: Callable[[], Tree]
) -> LossModel:
  """Makes a `LossModel` of a module, or of a function that makes a module.

  Raises ValueError if `model` is neither, or is a module of NNX or linen that
  has state besides parameters.
  """
  if isinstance(model, linen.Module):
    return _of_linen(model, loss, example)
  if isinstance(model, nnx.Module):
    return _of_nnx(lambda rngs: model, loss)
  require(
    callable(model),
    f"a model of type {type(model).__name__} cannot be trained: pass a "
    "module of NNX, linen or Equinox, a function from nnx.Rngs to a module, or "
    "a pair (init, loss)",
  )
  require(
    not (isinstance(model, type) and issubclass(model, linen.Module)),
    f"{getattr(model, '__name__', model)} is a class of linen: pass a module "
    "of it, with its fields",
  )
  # A module of Equinox is a tree of arrays. JAX sees a function that makes a
  # module as a single leaf, which is no array.
  if any(_is_trained(leaf) for leaf in jax.tree.leaves(model)):
    return _of_tree(model, loss)
  make: Any = model
  return _of_nnx(make, loss)


def _bound_loss_model(
  loss: ModelLoss, init: Callable, module: Callable[[Tree], Any]
) -> LossModel:
  """Makes a `LossModel` from a loss (module, batch) -> scalar.

  `module` is a function from parameters to a module that holds them.
  """

  def bound_loss(params: Any, batch: Any) -> Array:
    return loss(module(params), batch)

  return LossModel(init=init, loss=bound_loss, module=module)


def _of_linen(
  module: linen.Module, loss: ModelLoss, example: Callable[[], Tree]
) -> LossModel:
  """Makes a `LossModel` of a linen module, with `loss` run as its method.

  Raises ValueError if the module has state besides parameters.
  """
  # The batch is made here and not in `init`: JAX traces `init`, and the user's
  # `example` may do what cannot be traced.
  batch = jax.tree.map(np.asarray, example())

  # linen puts a parameter with partitioning metadata into a box.
  def boxed_params(key: Array) -> Any:
    variables = dict(
      module.init(key, jax.tree.map(jnp.asarray, batch), method=loss)
    )
    params = variables.pop("params", {})
    _check_state(variables)
    return params

  def init(key: Array) -> Any:
    return linen.meta.unbox(boxed_params(key))

  def bound_loss(params: Any, batch: Any) -> Any:
    return module.apply({"params": params}, batch, method=loss)

  # If the module fails, it fails now and not in the middle of a run.
  abstract = jax.eval_shape(boxed_params, jax.random.key(0))
  return LossModel(
    init=init,
    loss=bound_loss,
    module=lambda params: module.bind({"params": params}),
    partition=_rule_of_metadata(linen.get_partition_spec(abstract)),
  )


def _of_nnx(make: MakeModule, loss: ModelLoss) -> LossModel:
  """Makes a `LossModel` of a function from `nnx.Rngs` to a module of NNX.

  Raises ValueError if the module has state besides parameters.
  """
  # A parameter with partitioning metadata would be put on a mesh at once, which
  # does not exist here.
  with nnx.use_eager_sharding(False):
    abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
  _, abstract_params, others = nnx.split(abstract, nnx.Param, ...)
  _check_state(nnx.to_pure_dict(others))
  pure_params = nnx.to_pure_dict(abstract_params)
  bound = bound_module(abstract)

  def init(key: Array) -> Any:
    with nnx.use_eager_sharding(False):
      module = make(nnx.Rngs(key))
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    # Some keys are integers, e.g. in a list of layers. They become texts here.
    return nested(leaves_by_path(params))

  # `pure_params` has the keys of the module, integers included.
  loss_model = _bound_loss_model(
    loss, init, module=lambda params: bound(_with_leaves(pure_params, params))
  )
  partitions = nnx.to_pure_dict(nnx.get_partition_spec(abstract_params))
  return loss_model._replace(partition=_rule_of_metadata(partitions))


def _of_tree(model: Any, loss: ModelLoss) -> LossModel:
  """Makes a `LossModel` of a module that is a tree of arrays, as in Equinox.

  The module's arrays of floating-point or complex numbers are trained, from the
  values that they have now.
  """
  trained = nested(
    {
      path: leaf
      for path, leaf in leaves_by_path(model).items()
      if _is_trained(leaf)
    }
  )

  def init(key: Array) -> Any:
    del key  # The parameters are drawn already.
    return trained

  return _bound_loss_model(
    loss, init, module=lambda params: _with_leaves(model, params)
  )


def _with_leaves(tree: Any, params: Any) -> Any:
  """Returns `tree` with the leaves of `params` in place of its own.

  `params` is a nested dict that has some of the paths of the tree.
  """
  leaves = leaves_by_path(tree) | leaves_by_path(params)
  return jax.tree.unflatten(jax.tree.structure(tree), list(leaves.values()))


def _rule_of_metadata(partitions: Any) -> PartitionRule | None:
  """Returns a function (path, shape) -> the partition in a module's metadata.

  The function returns None for a parameter without metadata. If no parameter
  has metadata, None is returned instead of a function.

  Args:
    partitions: Tree with a `PartitionSpec` for each parameter. An empty one
      means that the parameter has no metadata.
  """
  by_path = {
    path: partition
    for path, partition in leaves_by_path(partitions).items()
    if len(partition) > 0
  }
  if not by_path:
    return None
  return lambda path, shape: by_path.get(path)


def _is_trained(leaf: Any) -> bool:
  """Returns whether a leaf is an array of floating-point or complex numbers."""
  if not isinstance(leaf, jax.Array | np.ndarray):
    return False
  return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _check_state(others: dict[str, Any]) -> None:
  """Raises ValueError if a module has state besides its parameters."""
  require(
    not others,
    f"the module has state that is no parameter ({', '.join(map(str, others))})"
    ": a loss must be a function of parameters, a batch and, for dropout, an"
    " argument `key`",
  )
