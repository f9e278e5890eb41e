"""Makes a `LossModel` of a user's model: a module, or a pair of functions.

A loss is a function (model, batch) -> scalar. Its argument `model` is the
module. For a pair of functions, it is the second function with its parameters
bound. Without a loss, batches are tokens, and the loss is the cross-entropy of
each token given the tokens before it. The parameters of a module become a
nested dict of arrays. A loss with a third argument, `key`, draws random
numbers, e.g. for dropout (`random_loss`).
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
  """Computes the mean cross-entropy of each token given the ones before it.

  Args:
    model: Function from tokens [B, L] to logits [B, L, V].
    tokens_BxS: Sequences of S = L + 1 tokens.

  Returns:
    The mean over all B * L predicted tokens, in nats.
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
  """Makes a `LossModel` of a model.

  Args:
    model: A `LossModel`; a module of NNX, linen or Equinox; a function from
      `nnx.Rngs` to a module of NNX, such as its class; or a pair of functions:
      (init, loss), or (init, apply) if `loss` is given. In a pair, `init` is
      (key) -> parameters, `loss` is (parameters, batch) -> scalar, and `apply`
      is (parameters, inputs) -> outputs.
    loss: Function (model, batch) -> scalar, or (model, batch, key) -> scalar if
      it draws random numbers. None: batches are tokens.
    example: Function that returns a batch, which linen needs for its init. The
      default returns two tokens.
    partition: Function from the path and the shape of a parameter to its
      partition among the devices of a replica (`distributed.partition_rules`).
      None: the partitioning metadata of the module decide, if it has any.

  Raises:
    ValueError: One line, if the model is none of these, if `loss` is given for
      a `LossModel`, or if a module has state that is not a parameter, e.g.
      running means or a stream of keys.
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
  """Makes a `LossModel`; `as_loss_model` then adds the user's partition rule.

  The partition is that of the module's metadata, if it has any.

  Args:
    model: Any model that `as_loss_model` accepts.
    loss: Function (model, batch) -> scalar, which reads a `KeyedBatch` if it is
      random. None: the model's own loss, or for a module the cross-entropy of
      tokens.
    example: Function that returns a batch.

  Raises:
    ValueError: One line, if the model is of no known kind, if it already has a
      loss and `loss` is given too, or if a module has state that is not a
      parameter.
  """
  if isinstance(model, LossModel):
    require(loss is None, "loss: the model that is passed in has one already")
    return model
  if isinstance(model, tuple) and len(model) == 2:
    init, function = model
    if loss is None:
      is_random = draws_random(function)
      return LossModel(
        init,
        loss=reads_keyed_batch(function) if is_random else function,
        draws_random=is_random,
      )
    return _bound_loss_model(
      loss, init, module=lambda params: functools.partial(function, params)
    )
  if loss is None:
    return _with_logits(_of_module(model, cross_entropy, example))
  return _of_module(model, loss, example)


def reads_tokens(model: Any, loss: ModelLoss | None) -> bool:
  """Returns whether a model is trained to predict tokens.

  The answer is True if neither the caller nor the model brings a loss, because
  the run then takes the cross-entropy of the next token.

  Args:
    model: Any model that `as_loss_model` accepts; None: the model of the
      config.
    loss: Function (model, batch) -> scalar; None: none was passed.
  """
  has_loss = isinstance(model, LossModel | tuple) or loss is not None
  return not has_loss


def _with_logits(model: LossModel) -> LossModel:
  """Adds the function `logits`, which calls the module with tokens.

  Args:
    model: A `LossModel` whose module returns logits [B, L, V] for tokens [B,
      L].
  """

  def logits(params: Any, tokens_BxL: Array) -> Array:
    return model.module(params)(tokens_BxL)

  return model._replace(logits=logits)


def _of_module(
  model: Any, loss: ModelLoss, example: Callable[[], Tree]
) -> LossModel:
  """Makes a `LossModel` of a module, or of a function that makes a module.

  Args:
    model: A module of linen, NNX or Equinox, or a function from `nnx.Rngs` to a
      module of NNX.
    loss: Function (model, batch) -> scalar.
    example: Function that returns a batch.

  Raises:
    ValueError: One line, if the model is neither a module nor a function, or if
      it has state that is not a parameter.
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
  if any(_is_trained(leaf) for leaf in jax.tree.leaves(model)):
    return _of_tree(model, loss)
  make: Any = model
  return _of_nnx(make, loss)


def _bound_loss_model(
  loss: ModelLoss, init: Callable, module: Callable[[Tree], Any]
) -> LossModel:
  """Makes a `LossModel` from a loss that takes a module, not parameters.

  Args:
    loss: Function (module, batch) -> mean loss, a scalar.
    init: Function (key) -> parameters.
    module: Function (parameters) -> module that holds these parameters.
  """

  def bound_loss(params: Any, batch: Any) -> Array:
    return loss(module(params), batch)

  return LossModel(init=init, loss=bound_loss, module=module)


def _of_linen(
  module: linen.Module, loss: ModelLoss, example: Callable[[], Tree]
) -> LossModel:
  """Makes a `LossModel` of a module of linen.

  Args:
    module: The module. `init` and `apply` call the loss as its method.
    loss: Function (model, batch) -> scalar.
    example: Function that returns a batch, which linen needs for its init.

  Raises:
    ValueError: If the module has state that is not a parameter.
  """
  # The batch is drawn here and not in `init`: JAX traces `init`, and `example`
  # is the user's code.
  batch = jax.tree.map(np.asarray, example())

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

  Args:
    make: Function from `nnx.Rngs` to the module.
    loss: Function (model, batch) -> scalar.

  Raises:
    ValueError: If the module has state that is not a parameter.
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
    return nested(leaves_by_path(params))

  loss_model = _bound_loss_model(
    loss, init, module=lambda params: bound(_with_leaves(pure_params, params))
  )
  partitions = nnx.to_pure_dict(nnx.get_partition_spec(abstract_params))
  return loss_model._replace(partition=_rule_of_metadata(partitions))


def _of_tree(model: Any, loss: ModelLoss) -> LossModel:
  """Makes a `LossModel` of a module that is itself a tree, as in Equinox.

  Its floating-point arrays are trained. They begin with the values that they
  have now.

  Args:
    model: The module, a tree of JAX that has arrays among its leaves.
    loss: Function (model, batch) -> scalar.
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
  """Returns a tree in which the leaves of a nested dict replace the old leaves.

  Args:
    tree: Any tree of JAX.
    params: Nested dict of new leaves, with some of the paths of the tree.
  """
  leaves = leaves_by_path(tree) | leaves_by_path(params)
  return jax.tree.unflatten(jax.tree.structure(tree), list(leaves.values()))


def _rule_of_metadata(partitions: Any) -> PartitionRule | None:
  """Returns the partition rule of a module's metadata.

  Args:
    partitions: Tree with a `PartitionSpec` for each parameter, as flax reads it
      from the parameters of a module. An empty one means that the parameter has
      no metadata.

  Returns:
    A function (path, shape) -> the parameter's partition, or None if this
    parameter has no metadata. If no parameter has metadata, the result is None
    instead of a function.
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
  """Returns whether a leaf is trained: whether it is an array of floats.

  Args:
    leaf: Leaf of a module, of any type.
  """
  if not isinstance(leaf, jax.Array | np.ndarray):
    return False
  return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _check_state(others: dict[str, Any]) -> None:
  """Raises ValueError if a module has state beside its parameters.

  Args:
    others: The other state by name; empty if there is none.
  """
  require(
    not others,
    f"the module has state that is no parameter ({', '.join(map(str, others))})"
    ": a loss must be a function of parameters, a batch and, for dropout, an"
    " argument `key`",
  )
