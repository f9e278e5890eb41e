"""An exchange and the inner steps that hide it."""

from typing import Any

import jax

from dilocox_jax.checks import require
from dilocox_jax.outer.transforms import OuterTransform
from dilocox_jax.plan.wire.collectives import stretch_ends, stretches
from dilocox_jax.pytypes import Index, Pausing, Scalar


def exchange_before_steps(
  outer: OuterTransform,
  run_steps,
  carry: Any,
  index,
  own,
  num_steps: Index,
  weight: Scalar | None = None,
):
  """Exchanges and runs steps, in the order that the compiler finds best.

  Args and results are those of `exchange_behind_steps`.
  """
  state, result = outer.exchange(carry.outer, index, own, weight)
  return run_steps(carry._replace(outer=state), num_steps), result


def exchange_behind_steps(
  outer: OuterTransform,
  run_steps,
  carry: Any,
  index,
  own,
  num_steps: Index,
  weight: Scalar | None = None,
):
  """Exchanges behind inner steps, a stretch of them for each message.

  Low rank: send the left factor, run steps, receive its mean, make it
  orthonormal, send the right factor, run the other steps, receive its mean.

  Left to itself, the compiler may end a transfer before the loop, or start it
  behind the loop. The barriers keep both ends in their places: the loop needs
  the step counter, which comes with what is sent, and what has arrived comes
  with the counter at the end of the loop.

  Args:
    outer: Exchanges pseudo-gradients.
    run_steps: Function (carry, count) -> carry.
    carry: NamedTuple with an outer state `outer`, and a counter `step` that the
      loop over inner steps needs and returns.
    index: Fragment of the pseudo-gradient.
    own: The pseudo-gradient of this replica.
    num_steps: Inner steps behind the exchange.
    weight: Weight of this replica, as for `OuterTransform.exchange`.

  Returns:
    The carry after the exchange and the steps; the result of the exchange.
  """
  ends = stretch_ends((), 1)
  if outer.aggregator.has_turns and outer.aggregator.stretch_ends:
    params = outer.partition.take(carry.outer.params, index)
    ends = outer.aggregator.stretch_ends(params)
  run = outer.exchange_paused(carry.outer, index, own, weight)
  leaving = next(run)
  for turn, count in enumerate(stretches(num_steps, ends)):
    leaving, step = jax.lax.optimization_barrier((leaving, carry.step))
    arriving = run.send(leaving)
    carry = run_steps(carry._replace(step=step), count)
    arrived, step = jax.lax.optimization_barrier((arriving, carry.step))
    carry = carry._replace(step=step)
    try:
      leaving = run.send(arrived)
    except StopIteration as stop:
      require(
        turn == len(ends) - 1,
        f"the aggregator's stretch_ends is {tuple(ends)}, of {len(ends)} turns,"
        f" but its average ends after {turn + 1}: they must be as many",
      )
      state, result = stop.value
      return carry._replace(outer=state), result
  # No steps are left to hide turns that `stretch_ends` does not know of.
  state, result = _to_its_end(run, leaving)
  return carry._replace(outer=state), result


def _to_its_end(run: Pausing, tree: Any) -> Any:
  """Sends a generator what it yields until it ends; returns its value."""
  try:
    while True:
      tree = run.send(tree)
  except StopIteration as stop:
    return stop.value
