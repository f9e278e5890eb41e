"""The gradient of one layer, taken apart into the steps that a schedule moves.

A pipeline runs a layer's forward, its input gradient and its weight gradient
in different ticks, so what one leaves for the next must be plain arrays that
lie in a buffer. JAX differentiates the layer; here its residuals are sorted
into those that are parameters, which a stage has anyway and must never store
per micro-batch, and the rest, and every product with a kernel is given a tap
at which the two factors of its weight gradient can be drawn off.

Letters in names: T tokens, D model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dilocox_jax.pytypes import Tree
from dilocox_jax.trees import leaves_by_path

# (layer's parameters, x [T, D], length, multiply) -> x [T, D].
Block = Callable[..., Array]
Leaves = dict[str, Array]  # A layer's leaves by path.
Pairs = dict[str, Leaves]  # "inputs" and "outputs" of products, by path.
PairShapes = dict[str, dict[str, jax.ShapeDtypeStruct]]

REMATS = ("none", "dots", "full")


@jax.custom_vjp
def _tapped(x, kernel, taps):
  """The product, whose taps get x and the gradient of the product."""
  del taps
  return jax.lax.dot(x, kernel)


def _tapped_forward(x, kernel, taps):
  input_tap, _ = taps
  return jax.lax.dot(x, kernel), (None if input_tap is None else x, kernel)


def _tapped_backward(kept, y_gradient):
  x, kernel = kept
  x_gradient = jax.lax.dot_general(y_gradient, kernel, (((1,), (1,)), ((), ())))
  # Nobody reads the kernel's gradient: `weight_gradients` makes it.
  return x_gradient, jnp.zeros_like(kernel), (x, y_gradient)


_tapped.defvjp(_tapped_forward, _tapped_backward)


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
  """A block's gradient in three steps, and the shapes of what lies between.

  Attributes:
    kernel_dtypes: Of every leaf that the block multiplies with, by path: the
      dtype of the product. Leaves are given to the methods in these.
    kept: Shapes and dtypes of what a forward leaves for its backward.
    pairs: The same of what an input gradient leaves for the weight gradient.
  """

  kernel_dtypes: dict[str, Any]
  kept: list[jax.ShapeDtypeStruct]
  pairs: PairShapes
  _call: Callable[..., Array]
  _sources: dict[str, str]  # Path of a product to that whose x is the same.
  _residuals: Any  # Structure of what jax.vjp keeps beside its arguments.
  _keeps_input: bool

  def forward(
    self, leaves: Leaves, x_TxD: Float[Array, "T D"]
  ) -> tuple[Float[Array, "T D"], list[Array]]:
    """The layer's output, and what is kept for `input_gradient`."""
    y_TxD, pullback = jax.vjp(self._call, *self._arguments(leaves, x_TxD))
    kept, _ = _strip(pullback)
    return y_TxD, [*kept, x_TxD] if self._keeps_input else kept

  def input_gradient(
    self, leaves: Leaves, kept: list[Array], y_gradient: Float[Array, "T D"]
  ) -> tuple[Float[Array, "T D"], Leaves, Pairs]:
    """Runs the layer backward, but for products that make weight gradients.

    Args:
      leaves: The layer's parameters, as in `forward`.
      kept: What `forward` kept.
      y_gradient: Gradient of the layer's output.

    Returns:
      Gradients of the input and of the leaves that are no kernels, and the
      factors of the kernels' gradients.
    """
    # Where the input is not kept nothing reads what stands in its place.
    x_TxD = kept[-1] if self._keeps_input else y_gradient
    residuals = kept[:-1] if self._keeps_input else kept
    pullback = jax.tree.unflatten(self._residuals, residuals)
    pullback.args_res = jax.tree.leaves(self._arguments(leaves, x_TxD))
    _, others, x_gradient, pairs = pullback(y_gradient)
    return x_gradient, others, pairs

  def weight_gradients(self, pairs: Pairs) -> Leaves:
    """One product a kernel; sums of low-precision factors in fp32."""
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
    # The taps have values for the sake of their gradients only.
    taps = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.pairs)
    return kernels, others, x_TxD, taps


def layer(
  block: Block,
  leaves: Tree,
  x_TxD: jax.ShapeDtypeStruct,
  length: int,
  remat: str = "dots",
) -> Layer:
  """Takes a block apart; computes nothing.

  Args:
    block: (parameters, x [T, D], length, multiply) -> x [T, D]. It must send
      each product with a kernel through multiply(path, x, kernel).
    leaves: Shapes and dtypes of one layer's parameters, a nested dict.
    x_TxD: Those of the stream.
    length: Tokens that attend to each other, L.
    remat: What a forward keeps. "none": whatever JAX does. "dots": results of
      products, and what is elementwise is computed again. "full": the input
      alone, and every product but the last is computed again.

  Raises:
    ValueError: If the block multiplies with what is no leaf of its own, or
      twice with the same.
  """
  if remat not in REMATS:
    raise ValueError(f"remat={remat!r} must be one of {', '.join(REMATS)}")
  shapes, structure = leaves_by_path(leaves), jax.tree.structure(leaves)
  dtypes, sources, pairs = _products(block, leaves, x_TxD, length)
  for path in dtypes:
    if path not in shapes:
      raise ValueError(f"multiply: {path!r} is none of {', '.join(shapes)}")

  def call(kernels: Leaves, others: Leaves, x_TxD: Array, taps: Pairs) -> Array:
    def multiply(path: str, x: Array, kernel: Array) -> Array:
      return _tapped(
        x, kernel, (taps["inputs"].get(path), taps["outputs"][path])
      )

    both = {**kernels, **others}
    tree = jax.tree.unflatten(structure, [both[path] for path in shapes])
    return block(tree, x_TxD, length, multiply)

  if remat != "none":
    saveable = jax.checkpoint_policies.dots_saveable
    policy = saveable if remat == "dots" else None
    # Forward and backward lie in different branches: nothing to keep apart.
    call = jax.checkpoint(call, policy=policy, prevent_cse=False)
  cast = {
    path: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(path, leaf.dtype))
    for path, leaf in shapes.items()
  }
  unsorted = Layer(dtypes, [], pairs, call, sources, None, False)
  found = []

  def probe(leaves: Leaves, x_TxD: Array) -> list[Array]:
    _, pullback = jax.vjp(call, *unsorted._arguments(leaves, x_TxD))
    keeps_input = bool(jax.tree.leaves(pullback.args_res[2]))
    kept, residuals = _strip(pullback)
    found.append((residuals, keeps_input))
    return [*kept, x_TxD] if keeps_input else kept

  kept = jax.eval_shape(probe, cast, x_TxD)
  return Layer(dtypes, kept, pairs, call, sources, *found[-1])


def _strip(pullback: Any) -> tuple[list[Array], Any]:
  """Residuals of jax.vjp that are no arguments of it, and their structure."""
  pullback.args_res = []
  return jax.tree.flatten(pullback)


def _products(
  block: Block, leaves: Tree, x_TxD: jax.ShapeDtypeStruct, length: int
) -> tuple[dict[str, Any], dict[str, str], PairShapes]:
  """What a block multiplies with what, from tracing it once."""
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

  jax.eval_shape(lambda p, x: block(p, x, length, record), leaves, x_TxD)
  return dtypes, sources, {"inputs": inputs, "outputs": outputs}
