"""What averages a tree over replicas, for any method and any rule.

An aggregator is to the replica axis what an optax transformation is to a
gradient: functions written for one replica. The exchange of this package
(`dilocox_jax.exchange`) is one; a user can write another.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from dilocox_jax.checks import require
from dilocox_jax.coroutines import Coroutine
from dilocox_jax.trees import Array, Tree


class Averaged(NamedTuple):
  """Result of an average, for one replica.

  Attributes:
    mean: The mean, a tree like the values. It is the same on all replicas,
      unless `Aggregator.is_shared` says that each has its own.
    sent: What the other replicas received of this replica's values.
    state: New state of the aggregator.
    retained: The part of the values that stays with the replica, a tree like
      them: what was neither sent nor held back in the state. The replica keeps
      it in its parameters, and the next pseudo-gradient has it. None: nothing.
  """

  mean: Tree
  sent: Tree
  state: Tree
  retained: Tree | None = None


class Aggregator(NamedTuple):
  """Averages a tree over the replica axis.

  Like an optax transformation it is a pair of functions, written for one
  replica that sends to the others. Mapped over M replicas it takes leaves
  [M, ...] to leaves [...], or to [M, ...] if `is_shared` is False.

  A replica that is away sends NaN, and one that has diverged sends values that
  are not finite. The mean must be that of the others, and what they keep for
  the next exchange must be finite.

  Attributes:
    init: Function from the parameters of one fragment to the state.
    average: Function from one replica's values, the state and the parameters
      that the values belong to, to `Averaged`, or to its first three fields.
      The parameters are the outer ones of a pseudo-gradient; few aggregators
      read them. If the function was made by `as_function` from a coroutine,
      inner steps can be put between its messages. In every turn the coroutine
      yields the arrays that it is about to send, sends the arrays with which it
      is resumed, yields the arrays that have arrived, and goes on with the
      arrays with which it is resumed.
    axes: Tree prefix of the state, e.g. a dict of axes for a dict: 0 where each
      replica has its own (the default), None where all replicas have the same.
      A mean that is shared may depend on the latter alone.
    observe: Function from the state to arrays to record, by name, with the
      exchange in `metrics.jsonl`. Those of three dimensions are taken for
      Gram matrices of an update, of which the rank alone is recorded.
    stretch_ends: Function from the parameters of a fragment to the shares of
      inner steps that hide each of these turns
      (`plan.overlap.stretch_ends`). None: all steps hide the first turn, and
      the steps that follow wait for the others.
    is_shared: Whether the mean is the same on all replicas. If it is not, as
      after an exchange between pairs, every replica has outer parameters of its
      own, and their mean is evaluated and kept.
  """

  init: Callable[[Tree], Tree]
  average: Callable[[Tree, Tree, Tree], Any]
  axes: Any = 0
  observe: Callable[[Tree], dict[str, Array]] = lambda state: {}
  stretch_ends: Callable[[Tree], tuple[int, ...]] | None = None
  is_shared: bool = True

  @property
  def has_turns(self) -> bool:
    """Whether `average` is a coroutine, which stops at its messages."""
    return hasattr(self.average, "coroutine")

  def average_coroutine(
    self, values: Tree, state: Tree, params: Tree
  ) -> Coroutine:
    """Returns `average` as a coroutine.

    An `average` that is a plain function has one turn: it stops before and
    after the whole function.

    Args:
      values: Values of this replica, as for `average`.
      state: State of the exchange before.
      params: Parameters that the values belong to.

    Returns:
      A generator that returns `Averaged`.
    """
    if self.has_turns:
      coroutine: Any = getattr(self.average, "coroutine")  # noqa: B009
      return Averaged(*(yield from coroutine(values, state, params)))
    values = yield values
    return Averaged(*(yield self.average(values, state, params)))

  def update(
    self, values: Tree, state: Tree, params: Tree = None
  ) -> tuple[Tree, Tree]:
    """Returns the mean and the new state.

    Args:
      values: Values of this replica, as for `average`.
      state: State of the exchange before.
      params: Parameters that the values belong to; few aggregators read them.

    Raises:
      ValueError: If a part of the values stays with the replica, which has
        nowhere to keep it.
    """
    averaged = Averaged(*self.average(values, state, params))
    require(
      averaged.retained is None,
      "keep_unsent=True needs a method that averages pseudo-gradients, of "
      "which a replica can keep a part: take feedback=1.0",
    )
    return averaged.mean, averaged.state
