"""Cuts the gradient of one layer into a forward and a backward.

A pipeline runs the forward and the backward of a layer at different times, so
the forward must return arrays that can be stored. They are the arrays that
`jax.vjp` keeps for the derivative (its residuals), without the layer's
parameters, which the stage has anyway.

Letters in names: T tokens of a micro-batch, D width of the residual stream.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from dilocox_jax.models.transformer import remat_wrapper
from dilocox_jax.trees import Tree

# Function (layer's parameters, x [T, D], length, **context) -> x [T, D], where
# `length` is the number of tokens in a sequence.
Block = Callable[..., Array]

# Number of arguments of the differentiated function: parameters and x.
_NUM_ARGUMENTS = 2


@dataclasses.dataclass(frozen=True, eq=False)
class LayerPasses:
  """The forward and the backward of a layer. `layer_passes` builds them.

  Attributes:
    saved: Shapes and dtypes of the arrays that a forward saves for its
      backward.
  """

  saved: list[jax.ShapeDtypeStruct]
  # Function (context, parameters, x [T, D]) -> x [T, D].
  _call: Callable[..., Array]
  # Tree structure of the result of `jax.vjp` without its saved arguments.
  _residuals: Any
  # Whether the derivative reads x. If so, x is the last of the saved arrays.
  _saves_input: bool

  def forward(
    self, layer: Tree, x_TxD: Float[Array, "T D"], context: Mapping[str, Array]
  ) -> tuple[Float[Array, "T D"], list[Any]]:
    """Returns the layer's output [T, D], and the arrays that `backward` needs.

    Args:
      layer: The layer's parameters.
      x_TxD: Input of the layer.
      context: Keyword arguments for the block, which have no gradient.
    """
    call = functools.partial(self._call, dict(context))
    y_TxD, pullback = jax.vjp(call, layer, x_TxD)
    # Without the parameters and the input, only the residuals are left.
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
      layer: The layer's parameters, with the values that `forward` got.
      saved: The arrays that `forward` returned.
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
  """Builds the forward and the backward of a layer.

  Args:
    block: Function (parameters, x [T, D], length, **context) -> x [T, D].
    layer: Shapes and dtypes of one layer's parameters.
    x_TxD: Shape and dtype of the layer's input and output, [T, D].
    length: Number of tokens in a sequence, L.
    remat: What a forward saves: "none", "dots" or "full"
      (`models.transformer.remat_wrapper`).
    context: Shapes and dtypes of the block's keyword arguments.

  Raises:
    RuntimeError: If the installed version of JAX does not support the cut
      (`replace_saved_arguments`).
  """

  @remat_wrapper(remat)
  def call(context: Mapping[str, Array], layer: Tree, x_TxD: Array) -> Array:
    return block(layer, x_TxD, length, **context)

  def probe(layer: Tree, x_TxD: Array, context: Any) -> tuple[Any, Any]:
    _, pullback = jax.vjp(functools.partial(call, context), layer, x_TxD)
    # If the derivative does not read x, JAX has put something without leaves
    # in the place of x.
    _, saved_input = replace_saved_arguments(pullback, [])
    return pullback, jax.tree.leaves(saved_input)

  # The pullback is a tree of arrays, so `eval_shape` can return it.
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

  JAX keeps those residuals that are arguments of the function in a list of
  their own, the undocumented attribute `args_res`. `LayerPasses.forward`
  empties the list, so that parameters are not stored for each micro-batch, and
  `LayerPasses.backward` fills it again.

  Args:
    pullback: Second result of `jax.vjp`; it is changed in place.
    arguments: New content of the list: a flat list of arrays, or an empty list.

  Returns:
    The old list: one entry for the parameters and one for x, or empty.

  Raises:
    RuntimeError: If the attribute is missing or has another form.
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
