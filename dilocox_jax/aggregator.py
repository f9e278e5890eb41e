"""The interface of aggregators, which average a tree over replicas.

An aggregator resembles an optax transformation: it is a pair of pure functions,
written for one replica. All methods and rules can use any aggregator.
`dilocox_jax.exchange` returns the aggregator of this package; a user can write
another one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from dilocox_jax.checks import require
from dilocox_jax.coroutines import Coroutine
from dilocox_jax.trees import Array, Boolean, Tree


class Averaged(NamedTuple):
  """Result of an average, for one replica.

  Attributes:
    mean: The mean, a tree like the values. It is the same on all replicas,
      unless `Aggregator.is_shared` is False.
    sent: This replica's values as the other replicas have received them, a tree
      like the values. With a codec that loses something they differ from the
      values.
    state: New state of the aggregator.
    retained: The part of the values that was not sent and is not in the state
      either, a tree like the values. The replica keeps this part in its
      parameters, so its next pseudo-gradient contains it. None: there is no
      such part.
    is_left_out: Whether a filter (`norm_filter`) left this replica out of the
      mean, a boolean scalar. `sent` is zeros then. None: there is no filter.
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

  A replica that is away sends NaN, and a replica that has diverged sends values
  that are not finite. The mean must be the mean of the other replicas, and the
  states of all replicas must stay finite.

  `average` may be made by `as_function` from a coroutine. Then inner steps can
  run between its messages. The coroutine yields before and after each
  collective. The caller runs inner steps there, and sends the yielded values
  back:

      message = yield message
      arrived = yield jax.lax.pmean(message, "replica")

  A message that needs the result of an earlier one begins a new *turn*.

  Attributes:
    init: Function (params) -> first state. `params` are the parameters of one
      fragment.
    average: Function (values, state, params) -> `Averaged`, or a tuple of its
      first three fields. `values` are this replica's values. `params` are the
      parameters to which the values belong: for a pseudo-gradient the outer
      parameters. Few aggregators read them.
    axes: Replica axes of the state, a tree prefix such as a dict of axes for a
      dict: 0 where each replica has its own leaves (the default), None where
      all replicas have the same. If the mean is shared, it may depend only on
      leaves that all replicas have.
    observe: Function (state) -> arrays by name, which are recorded with the
      exchange in `metrics.jsonl`. An array of three dimensions is read as Gram
      matrices of an update, and only their rank is recorded.
    stretch_ends: Function (params) -> how the inner steps that hide an exchange
      are divided among its turns, for a fragment with these parameters. The
      result has a numerator over `plan.overlap.PARTS` = 1024 for each turn.
      For example, (768, 1024) gives the first three quarters of the steps to
      the first turn (`plan.overlap.stretch_ends`). None: all inner steps run
      beside the first turn, and the other turns come after the steps.
    is_shared: Whether the mean is the same on all replicas. If it is not, as
      after an exchange between pairs, every replica has outer parameters of its
      own, and the mean of these is evaluated and kept.
  """

  init: Callable[[Tree], Tree]
  average: Callable[[Tree, Tree, Tree], Any]
  axes: Any = 0
  observe: Callable[[Tree], dict[str, Array]] = lambda state: {}
  stretch_ends: Callable[[Tree], tuple[int, ...]] | None = None
  is_shared: bool = True

  @property
  def has_turns(self) -> bool:
    """Whether `average` was made by `coroutines.as_function` from a coroutine.

    Such an average can be run message by message, with other work in between.
    """
    return hasattr(self.average, "coroutine")

  def average_coroutine(
    self, values: Tree, state: Tree, params: Tree
  ) -> Coroutine:
    """Returns `average` as a coroutine.

    An `average` that is a plain function is one turn: the coroutine stops
    before and after the whole function.

    Args:
      values: Values of this replica, a tree.
      state: State of the aggregator before the average.
      params: Parameters that the values belong to.

    Returns:
      A coroutine that returns `Averaged`.
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
      params: Parameters that the gradients belong to; None if the aggregator
        does not read them.

    Raises:
      ValueError: If `average` retains a part of the values. A replica can keep
        a part of a pseudo-gradient in its parameters, but not of a gradient.
    """
    averaged = Averaged(*self.average(values, state, params))
    require(
      averaged.retained is None,
      "keep_unsent=True needs a method that averages pseudo-gradients, of "
      "which a replica can keep a part: take feedback=1.0",
    )
    return averaged.mean, averaged.state
