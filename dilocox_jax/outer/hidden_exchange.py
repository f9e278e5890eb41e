"""An exchange and the inner steps that hide it."""

from typing import Any

import jax

from dilocox_jax.checks import require
from dilocox_jax.outer.outer_step import FragmentState, OuterStep
from dilocox_jax.plan.collective import stretch_ends, stretches
from dilocox_jax.pytypes import Index, Pausing, Scalar, Tree


def exchange_before_steps(
  outer: OuterStep,
  run_steps,
  progress: Any,
  state: FragmentState,
  own: Tree,
  num_steps: Index,
  weight: Scalar | None = None,
):
  """Exchanges and runs steps, in the order that the compiler finds best.

  Args and results are those of `exchange_behind_steps`.
  """
  arrived = outer.exchange(state, own, weight)
  return run_steps(progress, num_steps), arrived


def exchange_behind_steps(
  outer: OuterStep,
  run_steps,
  progress: Any,
  state: FragmentState,
  own: Tree,
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
    run_steps: Function (progress, count) -> progress.
    progress: NamedTuple with a counter `step` that the loop over inner steps
      needs and returns.
    state: State of the fragment.
    own: Its pseudo-gradient of this replica.
    num_steps: Inner steps behind the exchange.
    weight: Weight of this replica, as for `OuterStep.exchange`.

  Returns:
    The progress after the steps, and what `OuterStep.exchange` returns.
  """
  ends = stretch_ends((), 1)
  if outer.aggregator.has_turns and outer.aggregator.stretch_ends:
    ends = outer.aggregator.stretch_ends(state.params)
  run = outer.exchange_paused(state, own, weight)
  leaving = next(run)
  for turn, count in enumerate(stretches(num_steps, ends)):
    leaving, step = jax.lax.optimization_barrier((leaving, progress.step))
    arriving = run.send(leaving)
    progress = run_steps(progress._replace(step=step), count)
    arrived, step = jax.lax.optimization_barrier((arriving, progress.step))
    progress = progress._replace(step=step)
    try:
      leaving = run.send(arrived)
    except StopIteration as stop:
      require(
        turn == len(ends) - 1,
        f"the aggregator's stretch_ends is {tuple(ends)}, of {len(ends)} turns,"
        f" but its average ends after {turn + 1}: they must be as many",
      )
      return progress, stop.value
  # No steps are left to hide turns that `stretch_ends` does not know of.
  return progress, _to_its_end(run, leaving)


def _to_its_end(run: Pausing, tree: Any) -> Any:
  """Sends a generator what it yields until it ends; returns its value."""
  try:
    while True:
      tree = run.send(tree)
  except StopIteration as stop:
    return stop.value
