"""The interface of aggregators, which average trees of arrays over replicas.

`dilocox_jax.exchange` builds the usual aggregator; a user can write another.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from dilocox_jax.checks import require
from dilocox_jax.coroutines import Coroutine
from dilocox_jax.trees import Array, Boolean, Tree


class Averaged(NamedTuple):
  """Result of an average, for one replica.

  Attributes:
    mean: Mean over the replicas, a tree like the values.
    sent: What this replica contributed to the mean, a tree like the values. It
      differs from the values if a codec is lossy or if error feedback adds a
      residual to the values.
    state: New state of the aggregator.
    retained: Values that were neither sent nor kept in the state, as a tree.
      They stay in the replica's parameters, so its next pseudo-gradient
      contains them. None: nothing is retained.
    is_left_out: Whether a filter (`norm_filter`) left this replica out of the
      mean; then `sent` is zeros. None: there is no filter.
  """

  mean: Tree
  sent: Tree
  state: Tree
  retained: Tree | None = None
  is_left_out: Boolean | None = None


class Aggregator(NamedTuple):
  """Averages a tree over the replica axis.

  Like an optax transformation, an aggregator is a pair of functions, `init` and
  `average`, written for one replica. Mapped over M replicas, `average` takes
  leaves [M, ...] to a mean with leaves [...], or [M, ...] if `is_shared` is
  False.

  The values of an absent replica are NaN, and those of a diverged replica are
  not finite. Such replicas must not count in the mean, and the states of all
  replicas must stay finite.

  `dilocox_jax.coroutines.as_function` can make `average` from a coroutine, so
  that inner steps can run between messages. The coroutine yields before and
  after each collective, and is resumed with the yielded values:

      message = yield message
      arrived = yield jax.lax.pmean(message, "replica")

  Messages that can travel at the same time are a *turn*. A message that needs
  the result of an earlier message begins the next turn.

  Attributes:
    init: Function (params) -> first state.
    average: Function (values, state, params) -> `Averaged`, or a tuple of its
      first three fields. `params` are the parameters that the values belong to:
      for a pseudo-gradient the outer parameters.
    axes: Replica axes of the state, a tree prefix: 0 where each replica has its
      own leaves (the default), None where all replicas have equal leaves. If
      `is_shared`, the mean may depend on a replica's own leaves only through
      messages (collectives such as `pmean`).
    observe: Function (state) -> arrays by name, to record in `metrics.jsonl`.
      An array with three axes is read as the Gram matrices of a low-rank
      update. Its values are not recorded, only the rank that follows from them.
    stretch_ends: Function (params) -> for each turn, how many 1024ths of the
      inner steps have run when the turn ends. For example, with (768, 1024) the
      first three quarters of the steps run during the first turn. Turns without
      an entry come after all inner steps. More entries than turns raise
      ValueError. The function is only called if `has_turns`. None: all inner
      steps run during the first turn.
    is_shared: Whether the mean is the same on all replicas. If replicas average
      in pairs it is not, and each replica has its own outer parameters.
  """

  init: Callable[[Tree], Tree]
  average: Callable[[Tree, Tree, Tree], Any]
  axes: Any = 0
  observe: Callable[[Tree], dict[str, Array]] = lambda state: {}
  stretch_ends: Callable[[Tree], tuple[int, ...]] | None = None
  is_shared: bool = True

  @property
  def has_turns(self) -> bool:
    """Whether `as_function` made `average`, so that it can stop at messages."""
    return hasattr(self.average, "coroutine")

  def average_coroutine(
    self, values: Tree, state: Tree, params: Tree
  ) -> Coroutine:
    """Runs `average` as a coroutine that returns `Averaged`.

    If `average` is a plain function, the coroutine stops once before and once
    after the call of `average`.
    """
    if self.has_turns:
      coroutine: Any = getattr(self.average, "coroutine")  # noqa: B009
      return Averaged(*(yield from coroutine(values, state, params)))
    values = yield values
    return Averaged(*(yield self.average(values, state, params)))

  def update(
    self, values: Tree, state: Tree, params: Tree = None
  ) -> tuple[Tree, Tree]:
    """Averages gradients, and returns the mean and the new state.

    Args:
      values: Gradients of this replica.
      state: State of the aggregator before the average.
      params: Parameters of the gradients; None if the aggregator reads none.

    Raises:
      ValueError: If `average` retains a part of the values
        (`Averaged.retained`). The next pseudo-gradient would contain this part
        again, but the next gradients do not.
    """
    averaged = Averaged(*self.average(values, state, params))
    require(
      averaged.retained is None,
      "keep_unsent=True needs a method that averages pseudo-gradients, of "
      "which a replica can keep a part: take feedback=1.0",
    )
    return averaged.mean, averaged.state
