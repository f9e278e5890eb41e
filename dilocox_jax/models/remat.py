"""What a layer's forward pass saves for its backward pass."""

import functools
from collections.abc import Callable

import jax


def remat_wrapper(
  name: str, prevent_cse: bool = False
) -> Callable[[Callable], Callable]:
  """Returns a wrapper that decides what a layer's forward saves.

  Args:
    name: One of `plan.choices.REMATS`. "none" saves whatever JAX saves. "dots"
      saves the results of products; the backward computes everything that is
      elementwise again, and fused attention. "full" saves the layer's input
      alone; the backward computes every product but the last again.
    prevent_cse: Whether to keep XLA from merging the forward with the forward
      that is computed again. This is needed where both may lie in the same
      computation, as in layers that are not in a loop.
  """
  checkpoint = functools.partial(jax.checkpoint, prevent_cse=prevent_cse)
  saves_products = jax.checkpoint_policies.dots_saveable
  return {
    "none": lambda call: call,
    "dots": functools.partial(checkpoint, policy=saves_products),
    "full": checkpoint,
  }[name]
