"""Cuts the gradient of one layer into a forward and a backward.

A pipeline runs a layer's forward and its backward in different ticks. So the
forward must leave plain arrays for the backward, which lie in a buffer. JAX
differentiates the layer. This module sorts the residuals of that derivative
into two groups: parameters and all other arrays. A stage has the parameters
anyway, and must not store a copy of them for each micro-batch.

Letters in names: T tokens, D model.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from dilocox_jax.models.transformer import remat_wrapper
from dilocox_jax.trees import Tree

# (layer's parameters, x [T, D], length, **context) -> x [T, D].
Block = Callable[..., Array]

_NUM_ARGUMENTS = 2  # Of the differentiated function: parameters and x.


@dataclasses.dataclass(frozen=True, eq=False)
class LayerPasses:
  """A block's forward and backward, and the shapes of the arrays between them.

  Attributes:
    saved: Shapes and dtypes of the arrays that a forward saves for its
      backward.
  """

  saved: list[jax.ShapeDtypeStruct]
  _call: Callable[..., Array]
  # Tree structure of the residuals of jax.vjp that are not its arguments.
  _residuals: Any
  _saves_input: bool

  def forward(
    self, layer: Tree, x_TxD: Float[Array, "T D"], context: Mapping[str, Array]
  ) -> tuple[Float[Array, "T D"], list[Any]]:
    """Returns the layer's output, and the arrays for `backward`.

    Some of these arrays may be constants, such as the tables of a kernel. They
    are not of the type `Array`.

    Args:
      layer: The layer's parameters.
      x_TxD: Input of the layer.
      context: Keyword arguments of the block, which have no gradient. They are
        saved if the backward needs them.
    """
    call = functools.partial(self._call, dict(context))
    y_TxD, pullback = jax.vjp(call, layer, x_TxD)
    replace_saved_arguments(pullback, [])
    saved = jax.tree.leaves(pullback)
    if self._saves_input:
      saved.append(x_TxD)
    return y_TxD, saved

  def backward(
    self, layer: Tree, saved: list[Array], y_gradient: Float[Array, "T D"]
  ) -> tuple[Tree, Float[Array, "T D"]]:
    """Returns the gradients of the layer's parameters and of its input.

    Args:
      layer: The layer's parameters, as in `forward`.
      saved: The arrays that `forward` saved.
      y_gradient: Gradient of the layer's output.
    """
    if self._saves_input:
      x_TxD = saved[-1]
      residuals = saved[:-1]
    else:
      # The derivative does not read the input. Any array of the same shape can
      # take its place.
      x_TxD = y_gradient
      residuals = saved
    pullback = jax.tree.unflatten(self._residuals, residuals)
    replace_saved_arguments(pullback, jax.tree.leaves((layer, x_TxD)))
    return pullback(y_gradient)


def layer_passes(
  block: Block,
  layer: Tree,
  x_TxD: jax.ShapeDtypeStruct,
  length: int,
  remat: str,
  context: Mapping[str, jax.ShapeDtypeStruct],
) -> LayerPasses:
  """Cuts the gradient of a block. It works with shapes and computes nothing.

  Args:
    block: (parameters, x [T, D], length, **context) -> x [T, D].
    layer: Shapes and dtypes of one layer's parameters.
    x_TxD: Shape and dtype of the stream.
    length: Tokens that attend to each other, L.
    remat: Name of what a forward saves (`remat_wrapper`). Forward and backward
      are in different loops, so XLA cannot merge them.
    context: Shapes and dtypes of the block's keyword arguments.

  Raises:
    RuntimeError: If the installed JAX cannot cut a gradient (see
      `replace_saved_arguments`).
  """

  @remat_wrapper(remat)
  def call(context: Mapping[str, Array], layer: Tree, x_TxD: Array) -> Array:
    return block(layer, x_TxD, length, **context)

  def probe(layer: Tree, x_TxD: Array, context: Any) -> tuple[Any, Any]:
    _, pullback = jax.vjp(functools.partial(call, context), layer, x_TxD)
    # An argument that the derivative does not read has no leaves here.
    _, saved_input = replace_saved_arguments(pullback, [])
    return pullback, jax.tree.leaves(saved_input)

  pullback, saved_input = jax.eval_shape(probe, layer, x_TxD, dict(context))
  saved, residuals = jax.tree.flatten(pullback)
  return LayerPasses(
    saved=[*saved, *saved_input],
    _call=call,
    _residuals=residuals,
    _saves_input=bool(saved_input),
  )


def replace_saved_arguments(pullback: Any, arguments: list[Array]) -> list[Any]:
  """Replaces the arguments that a result of `jax.vjp` has saved.

  It changes the attribute `args_res`, which JAX does not document and which no
  other code of this package uses. The reason is that a derivative saves the
  layer's kernels among its residuals. With 8 micro-batches in flight the
  buffers of a stage would hold every kernel 8 times. JAX keeps the residuals
  that are arguments in this list, separate from all other residuals. So a
  forward empties the list before its residuals go into a buffer, and a backward
  fills it with the parameters that the stage holds anyway.

  JAX 0.10.2 and 0.12.0.1, which `constraints/` pins, have the attribute.

  Args:
    pullback: Second result of `jax.vjp` of a function of two arguments, or
      such a result that was flattened with an empty list and unflattened. It
      is changed in place.
    arguments: New arguments, as a flat list of arrays.

  Returns:
    The old list: one entry per argument, or no entry.

  Raises:
    RuntimeError: If the attribute is missing, cannot be set, or has another
      form in the installed version of JAX.
  """
  try:
    old = pullback.args_res
    if not isinstance(old, list) or len(old) not in (0, _NUM_ARGUMENTS):
      raise AttributeError(f"args_res is {type(old).__name__}")
    pullback.args_res = arguments
  except AttributeError as error:
    raise RuntimeError(
      f"JAX {jax.__version__} does not keep the saved arguments of jax.vjp in a"
      f" list args_res ({error}), so stages cannot cut gradients: install a"
      " version pinned in constraints/, or use mesh.num_stages=1 and"
      " mesh.num_data_shards=1"
    ) from error
  return old
