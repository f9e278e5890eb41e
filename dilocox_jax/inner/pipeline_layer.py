"""Splits the gradient of one layer into steps that a schedule can move.

A pipeline runs a layer's forward, its input gradient and its weight gradient
in different ticks. So everything that one step leaves for the next must be
plain arrays that lie in a buffer. JAX differentiates the layer. This module
sorts the residuals of that derivative into two groups: parameters, which a
stage has anyway and must never store once per micro-batch, and all the rest.
It also gives every product with a kernel a tap, from which the two factors of
the kernel's gradient can be read.

Letters in names: T tokens, D model.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dilocox_jax.models.remat import remat_wrapper
from dilocox_jax.trees import Tree, leaves_by_path

# (layer's parameters, x [T, D], length, multiply, **context) -> x [T, D].
Block = Callable[..., Array]
Leaves = dict[str, Array]  # A layer's leaves by path.
Pairs = dict[str, Leaves]  # "inputs" and "outputs" of products, by path.
PairShapes = dict[str, dict[str, jax.ShapeDtypeStruct]]
NO_CONTEXT: Mapping[str, Any] = types.MappingProxyType({})

# The differentiated function takes (kernels, others, x, taps).
_NUM_ARGUMENTS, _X = 4, 2


# How the taps split a gradient, for y = x @ W with x [T, I] and W [I, O]:
#
#   dx = dy @ W.T     the input gradient; the stage before waits for it
#   dW = x.T @ dy     the weight gradient; nobody waits for it before the
#                     optimizer, so ZB-H1 runs it in a tick that would be idle
#
# JAX would compute both at once. A tap is an extra argument that adds nothing
# to y. We may define its "gradient" as we like, so we define it to be x or dy.
# The backward pass then returns (x, dy) in place of dW, and the product of the
# two is left for `SplitLayer.weight_gradients`.
@jax.custom_vjp
def _tapped(x, kernel, taps):
  """Returns x @ kernel; the gradients of the taps are x and dy."""
  del taps
  return jax.lax.dot(x, kernel)


def _tapped_forward(x, kernel, taps):
  # Query, key and value read the same x. Only the first of them has an input
  # tap, so x is saved once and not three times.
  input_tap, _ = taps
  return jax.lax.dot(x, kernel), (None if input_tap is None else x, kernel)


def _tapped_backward(residuals, y_gradient):
  x, kernel = residuals
  x_gradient = jax.lax.dot_general(y_gradient, kernel, (((1,), (1,)), ((), ())))
  # Nothing reads these zeros, so XLA removes them: `weight_gradients` makes
  # the kernel's gradient.
  return x_gradient, jnp.zeros_like(kernel), (x, y_gradient)


_tapped.defvjp(_tapped_forward, _tapped_backward)


@dataclasses.dataclass(frozen=True, eq=False)
class SplitLayer:
  """A block's gradient in three steps, and the shapes of what lies between.

  Attributes:
    kernel_dtypes: Dtype of the product by path, for every leaf that the block
      multiplies with. The methods take these leaves in these dtypes.
    saved: Shapes and dtypes of the arrays that a forward saves for its
      backward.
    pairs: Shapes and dtypes of the arrays that an input gradient leaves for
      its weight gradient.
  """

  kernel_dtypes: dict[str, Any]
  saved: list[jax.ShapeDtypeStruct]
  pairs: PairShapes
  _call: Callable[..., Array]
  # Path of each product -> path of the first product that reads the same x.
  _sources: dict[str, str]
  _residuals: Any  # Tree structure of what jax.vjp saves beside its arguments.
  _saves_input: bool

  def forward(
    self,
    leaves: Leaves,
    x_TxD: Float[Array, "T D"],
    context: Mapping[str, Array] = NO_CONTEXT,
  ) -> tuple[Float[Array, "T D"], list[Any]]:
    """Returns the layer's output, and the arrays for `input_gradient`.

    A kernel's tables are among them as constants, which are no `Array`.

    Args:
      leaves: The layer's parameters.
      x_TxD: Input of the layer.
      context: What the block takes by name and has no gradient. What the
        backward needs of it is saved.
    """
    call = functools.partial(self._call, dict(context))
    y_TxD, pullback = jax.vjp(call, *self._arguments(leaves, x_TxD))
    replace_saved_arguments(pullback, [])
    saved = jax.tree.leaves(pullback)
    return y_TxD, [*saved, x_TxD] if self._saves_input else saved

  def input_gradient(
    self, leaves: Leaves, saved: list[Array], y_gradient: Float[Array, "T D"]
  ) -> tuple[Float[Array, "T D"], Leaves, Pairs]:
    """Runs the layer backward, without the products of weight gradients.

    Args:
      leaves: The layer's parameters, as in `forward`.
      saved: The arrays that `forward` saved.
      y_gradient: Gradient of the layer's output.

    Returns:
      Gradient of the input, gradients of the leaves that are not kernels, and
      the factors of the kernels' gradients.
    """
    # If the input was not saved, the derivative does not read it. Then any
    # array of the same shape can take its place.
    x_TxD = saved[-1] if self._saves_input else y_gradient
    residuals = saved[:-1] if self._saves_input else saved
    pullback = jax.tree.unflatten(self._residuals, residuals)
    arguments = self._arguments(leaves, x_TxD)
    replace_saved_arguments(pullback, jax.tree.leaves(arguments))
    _, others, x_gradient, pairs = pullback(y_gradient)
    return x_gradient, others, pairs

  def weight_gradients(self, pairs: Pairs) -> Leaves:
    """Returns x.T @ dy for each kernel, summed in fp32 or wider."""
    return {
      path: jax.lax.dot_general(
        pairs["inputs"][self._sources[path]],
        gradient,
        (((0,), (0,)), ((), ())),
        preferred_element_type=np.promote_types(np.float32, gradient.dtype),
      )
      for path, gradient in pairs["outputs"].items()
    }

  def _arguments(self, leaves: Leaves, x_TxD: Array) -> tuple:
    kernels = {p: x for p, x in leaves.items() if p in self.kernel_dtypes}
    others = {p: x for p, x in leaves.items() if p not in self.kernel_dtypes}
    # Only the gradients of the taps matter; their values are never read.
    taps = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.pairs)
    return kernels, others, x_TxD, taps


def split_layer(
  block: Block,
  leaves: Tree,
  x_TxD: jax.ShapeDtypeStruct,
  length: int,
  remat: str = "dots",
  context: Mapping[str, jax.ShapeDtypeStruct] = NO_CONTEXT,
) -> SplitLayer:
  """Splits the gradient of a block; works with shapes and computes nothing.

  Args:
    block: (parameters, x [T, D], length, multiply, **context) -> x [T, D]. It
      must send each product with a kernel through multiply(path, x, kernel).
    leaves: Shapes and dtypes of one layer's parameters, a nested dict.
    x_TxD: Shape and dtype of the stream.
    length: Tokens that attend to each other, L.
    remat: What a forward saves (`models.remat`).
    context: Shapes and dtypes of what the block takes by name.

  Raises:
    ValueError: If the block multiplies with something that is not one of its
      leaves, or twice with the same leaf.
    RuntimeError: If this JAX cannot split a gradient, see
      `replace_saved_arguments`.
  """
  # Forward and backward lie in different loops, so XLA cannot merge them.
  wrap = remat_wrapper(remat)
  shapes, structure = leaves_by_path(leaves), jax.tree.structure(leaves)
  dtypes, sources, pairs = _products(block, leaves, x_TxD, length, context)
  for path in dtypes:
    if path not in shapes:
      raise ValueError(f"multiply: {path!r} is none of {', '.join(shapes)}")

  def call(
    context: Mapping[str, Array],
    kernels: Leaves,
    others: Leaves,
    x_TxD: Array,
    taps: Pairs,
  ) -> Array:
    def multiply(path: str, x: Array, kernel: Array) -> Array:
      return _tapped(
        x, kernel, (taps["inputs"].get(path), taps["outputs"][path])
      )

    both = {**kernels, **others}
    layer = jax.tree.unflatten(structure, [both[path] for path in shapes])
    return block(layer, x_TxD, length, multiply, **context)

  call = wrap(call)
  cast = {
    path: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(path, leaf.dtype))
    for path, leaf in shapes.items()
  }
  unfinished = SplitLayer(dtypes, [], pairs, call, sources, None, False)
  residuals, saves_input = None, False

  def probe(leaves: Leaves, x_TxD: Array, context: Any) -> list[Any]:
    nonlocal residuals, saves_input
    with_context = functools.partial(call, context)
    _, pullback = jax.vjp(with_context, *unfinished._arguments(leaves, x_TxD))
    arguments = replace_saved_arguments(pullback, [])
    # An argument that the derivative does not read has no leaves here.
    saves_input = bool(jax.tree.leaves(arguments[_X]))
    saved, residuals = jax.tree.flatten(pullback)
    return [*saved, x_TxD] if saves_input else saved

  saved = jax.eval_shape(probe, cast, x_TxD, dict(context))
  return dataclasses.replace(
    unfinished, saved=saved, _residuals=residuals, _saves_input=saves_input
  )


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
    pullback: Second result of `jax.vjp` of a function of four arguments, or
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
      f" list args_res ({error}), so stages cannot split gradients: install a"
      " version pinned in constraints/, or use mesh.num_stages=1 and"
      " mesh.num_data_shards=1"
    ) from error
  return before


def _products(
  block: Block,
  leaves: Tree,
  x_TxD: jax.ShapeDtypeStruct,
  length: int,
  context: Mapping[str, jax.ShapeDtypeStruct],
) -> tuple[dict[str, Any], dict[str, str], PairShapes]:
  """Traces a block once and lists its products with kernels.

  Returns:
    Dtype of each product by path, the path of the first product that reads
    the same x, and shapes of the factors of the weight gradients.
  """
  dtypes, sources, inputs, outputs = {}, {}, {}, {}
  seen = []

  def record(path: str, x: Array, kernel: Array) -> Array:
    if path in dtypes:
      raise ValueError(f"multiply: {path!r} is multiplied twice")
    y = jax.lax.dot(x, kernel)
    dtypes[path] = kernel.dtype
    source = next((name for name, other in seen if other is x), path)
    if source == path:
      seen.append((path, x))
      inputs[path] = jax.ShapeDtypeStruct(x.shape, x.dtype)
    sources[path] = source
    outputs[path] = jax.ShapeDtypeStruct(y.shape, y.dtype)
    return y

  jax.eval_shape(
    lambda p, x, context: block(p, x, length, record, **context),
    leaves,
    x_TxD,
    dict(context),
  )
  return dtypes, sources, {"inputs": inputs, "outputs": outputs}
