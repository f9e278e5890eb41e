"""Cuts the gradient of one layer into a forward and a backward.

A pipeline runs a layer's forward and its backward in different ticks. So what
the one leaves for the other must be plain arrays that lie in a buffer. JAX
differentiates the layer. This module sorts the residuals of that derivative
into two groups: parameters, which a stage has anyway and must never store once
per micro-batch, and all the rest.

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
  """A block's forward and backward, and the shapes of what lies between.

  Attributes:
    saved: Shapes and dtypes of the arrays that a forward saves for its
      backward.
  """

  saved: list[jax.ShapeDtypeStruct]
  _call: Callable[..., Array]
  _residuals: Any  # Tree structure of what jax.vjp saves beside its arguments.
  _saves_input: bool

  def forward(
    self, layer: Tree, x_TxD: Float[Array, "T D"], context: Mapping[str, Array]
  ) -> tuple[Float[Array, "T D"], list[Any]]:
    """Returns the layer's output, and the arrays for `backward`.

    A kernel's tables are among them as constants, which are no `Array`.

    Args:
      layer: The layer's parameters.
      x_TxD: Input of the layer.
      context: What the block takes by name and has no gradient. What the
        backward needs of it is saved.
    """
    call = functools.partial(self._call, dict(context))
    y_TxD, pullback = jax.vjp(call, layer, x_TxD)
    replace_saved_arguments(pullback, [])
    saved = jax.tree.leaves(pullback)
    return y_TxD, [*saved, x_TxD] if self._saves_input else saved

  def backward(
    self, layer: Tree, saved: list[Array], y_gradient: Float[Array, "T D"]
  ) -> tuple[Tree, Float[Array, "T D"]]:
    """Returns the gradients of the layer's parameters and of its input.

    Args:
      layer: The layer's parameters, as in `forward`.
      saved: The arrays that `forward` saved.
      y_gradient: Gradient of the layer's output.
    """
    # If the input was not saved, the derivative does not read it. Then any
    # array of the same shape can take its place.
    x_TxD = saved[-1] if self._saves_input else y_gradient
    residuals = saved[:-1] if self._saves_input else saved
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
  """Cuts the gradient of a block; works with shapes and computes nothing.

  Args:
    block: (parameters, x [T, D], length, **context) -> x [T, D].
    layer: Shapes and dtypes of one layer's parameters.
    x_TxD: Shape and dtype of the stream.
    length: Tokens that attend to each other, L.
    remat: What a forward saves (`remat_wrapper`). Forward and backward lie in
      different loops, so XLA cannot merge them.
    context: Shapes and dtypes of what the block takes by name.

  Raises:
    RuntimeError: If this JAX cannot cut a gradient, see
      `replace_saved_arguments`.
  """

  @remat_wrapper(remat)
  def call(context: Mapping[str, Array], layer: Tree, x_TxD: Array) -> Array:
    return block(layer, x_TxD, length, **context)

  def probe(layer: Tree, x_TxD: Array, context: Any) -> tuple[Any, Any]:
    _, pullback = jax.vjp(functools.partial(call, context), layer, x_TxD)
    # An argument that the derivative does not read has no leaves here.
    _, of_input = replace_saved_arguments(pullback, [])
    return pullback, jax.tree.leaves(of_input)

  pullback, of_input = jax.eval_shape(probe, layer, x_TxD, dict(context))
  saved, residuals = jax.tree.flatten(pullback)
  return LayerPasses([*saved, *of_input], call, residuals, bool(of_input))


def replace_saved_arguments(pullback: Any, arguments: list[Array]) -> list[Any]:
  """Replaces the arguments that a result of `jax.vjp` has saved.

  Nothing else in this package touches the attribute `args_res`, which JAX does
  not document. It is needed because a derivative saves the layer's kernels
  among its residuals. With 8 micro-batches in flight the buffers of a stage
  would hold every kernel 8 times. JAX keeps arguments that are residuals in
  this list, apart from all other residuals. So a forward empties the list
  before its residuals go into a buffer, and a backward fills it with the
  parameters that the stage holds anyway.

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
    before = pullback.args_res
    if not isinstance(before, list) or len(before) not in (0, _NUM_ARGUMENTS):
      raise AttributeError(f"args_res is {type(before).__name__}")
    pullback.args_res = arguments
  except AttributeError as error:
    raise RuntimeError(
      f"JAX {jax.__version__} does not keep the saved arguments of jax.vjp in a"
      f" list args_res ({error}), so stages cannot cut gradients: install a"
      " version pinned in constraints/, or use mesh.num_stages=1 and"
      " mesh.num_data_shards=1"
    ) from error
  return before
