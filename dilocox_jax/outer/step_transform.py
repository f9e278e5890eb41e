"""DiLoCo and its relatives as an optax transform of one inner step.

The transform holds everything: the inner optimizer's state, and for every
fragment the outer parameters, the outer optimizer's state, and what is in
flight. A step without an event of the schedule runs the inner optimizer alone;
exchange and outer step stand under one conditional.

Fragments of one group (`fragment_view`) have one state, stacked, and the
conditional has one branch for all of them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_batching import custom_vmap

from dilocox_jax.outer import events
from dilocox_jax.outer.fragment_view import FragmentView
from dilocox_jax.outer.outer_step import FragmentState, OuterStep
from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.outer.step_state import StepState
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule
from dilocox_jax.trees import Array, Index, Tree, has_values


class Moving(NamedTuple):
  """What a step does to the parameters of a replica, leaf by leaf.

  Attributes:
    updates: What is to be added to them now.
    correction: What is added after each inner step (`ApplyRule.correct`); None:
      nothing.
  """

  updates: Tree
  correction: Tree | None


# What a step does, and the states of all groups of fragments.
Operand = tuple[Moving, tuple[FragmentState, ...]]
Changed = tuple[Moving, FragmentState]  # And the state of one fragment.
Cut = tuple[int, Any]  # The group of a fragment, and its index in the group.


def pseudo_gradient_steps(
  outer: OuterStep, inner: optax.GradientTransformation, view: FragmentView
) -> optax.GradientTransformationExtraArgs:
  """Builds the transform of a method that exchanges pseudo-gradients.

  Args:
    outer: Measures, exchanges and applies a fragment.
    inner: Optimizer of the inner steps.
    view: Divides a tree into fragments.

  Raises:
    ValueError: If the rounds of the schedule differ in length.
  """
  if not outer.method.schedule.is_regular:
    raise ValueError(
      "this schedule has rounds of different lengths, and a transform of "
      "single steps needs rounds of one length: take dilocox_jax.make_rounds"
    )
  inner = optax.with_extra_args_support(inner)
  fragment_events = _FragmentEvents(outer, view)

  def init(params: Tree) -> Any:
    # Copies, so that parameters and state can both be donated to a step.
    copies = jax.tree.map(jnp.copy, params)
    step = jnp.zeros((), jnp.int32)
    fragments = fragment_events.init(copies)
    return StepState(
      step=step,
      inner=inner.init(params),
      fragments=fragments,
      view=view,
      correction=outer.first_correction(params),
    )

  def update(updates, state, params=None, **extra):
    if params is None:
      raise ValueError(
        "update needs the parameters: tx.update(grads, state, params)"
      )
    _check_is_mapped(state.step, outer.axis_name)
    updates, inner_state = inner.update(updates, state.inner, params, **extra)
    step = _same_for_all(state.step + 1)
    if state.correction is not None:
      updates = jax.tree.map(jnp.add, updates, state.correction)
    moving, fragments = fragment_events.run(
      step, params, Moving(updates, state.correction), state.fragments
    )
    state = state._replace(
      step=step,
      inner=inner_state,
      fragments=fragments,
      correction=moving.correction,
    )
    return moving.updates, state

  return optax.GradientTransformationExtraArgs(init, update)


class _FragmentEvents:
  """What the schedule has after an inner step, for one replica."""

  def __init__(self, outer: OuterStep, view: FragmentView):
    self.outer = outer
    self.view = view
    self.schedule = outer.method.schedule
    self.groups = view.groups
    self.members = [
      [p for p, own in enumerate(self.groups) if own == group]
      for group in range(max(self.groups) + 1)
    ]

  def init(self, params: Tree) -> tuple[FragmentState, ...]:
    """Returns the first states of all groups.

    Raises:
      ValueError: If the fragments do not cover the tree.
    """
    # `optax.tree.map_params` calls init with a tree that has no leaves.
    if jax.tree.leaves(params):
      self.view.check(params)
    return tuple(map(functools.partial(self._first, params), self.members))

  def _first(self, params: Tree, members: list[int]) -> FragmentState:
    """Returns the state of a group; what it has in flight is zeros.

    The newest of `depth` pseudo-gradients comes last, and a send drops the
    first one. It is applied when it is the first, and zeros before that.
    """

    def first(index: Any) -> FragmentState:
      own = self.view.extract(params, self.groups[members[0]], index)
      zeros = jax.tree.map(jnp.zeros_like, own)
      in_flight = (zeros,) * self.schedule.depth
      return self.outer.init(own)._replace(in_flight=in_flight)

    indices = self._indices(members)
    return first(indices) if len(members) == 1 else jax.vmap(first)(indices)

  def _indices(self, members: list[int]) -> Any:
    """Returns the index of one fragment, or the stacked indices of several."""
    indices: list[Any] = [self.view.index(fragment) for fragment in members]
    return indices[0] if len(indices) == 1 else jnp.asarray(np.stack(indices))

  def run(
    self,
    step: Index,
    params: Tree,
    moving: Moving,
    fragments: tuple[FragmentState, ...],
  ) -> Operand:
    """Runs the events after a step.

    Args:
      step: Inner steps done, this one included.
      params: Parameters before the inner step.
      moving: What the inner optimizer adds to them, and the correction.
      fragments: States of all groups of fragments.

    Returns:
      What is to be added to `params`, the new correction, and the new states.
    """
    operand = moving, fragments
    overlap = self.schedule.overlap_steps
    if not self.schedule.is_whole_rounds:
      apply = functools.partial(self._apply, params)
      operand = self._switch(step - overlap, apply, operand)
    send = functools.partial(self._send, params, step > overlap)
    return self._switch(step, send, operand)

  def _switch(
    self, send_step: Index, event: Callable, operand: Operand
  ) -> Operand:
    """Runs the event of the fragment that is sent after a step, if any.

    Args:
      send_step: The step; it lies in the past for an apply.
      event: Function (cut, `Moving`, state of the fragment) -> the last two.
      operand: What the event changes.
    """
    number = _fragment_at(self.schedule, send_step)
    branches = [_unchanged]
    for group, state in enumerate(operand[1]):
      change = functools.partial(self._change, event, group, number)
      # One number in two slices leaves one of them empty.
      branches.append(change if has_values(state.params) else _unchanged)
    is_due = (number >= 0) & (send_step > 0)
    branch = jnp.where(is_due, jnp.asarray(self.groups)[number] + 1, 0)
    return jax.lax.switch(branch, [_like_given(b) for b in branches], operand)

  def _change(
    self, event: Callable, group: int, number: Index, operand: Operand
  ) -> Operand:
    """Runs an event of a fragment of a group."""
    moving, fragments = operand
    members = self.members[group]
    index = self._indices(members)
    state = fragments[group]
    row = 0
    if len(members) > 1:
      row = jnp.clip(number - members[0], 0, len(members) - 1)
      take = jax.lax.dynamic_index_in_dim
      index = index[row]
      state = jax.tree.map(lambda leaf: take(leaf, row, 0, False), state)
    moving, state = event((group, index), moving, state)
    if len(members) > 1:
      put = jax.lax.dynamic_update_index_in_dim
      state = jax.tree.map(
        lambda old, new: put(old, new, row, 0), fragments[group], state
      )
    return moving, (*fragments[:group], state, *fragments[group + 1 :])

  def _send(
    self, params: Tree, has_arrived: Array, cut: Cut, moving: Moving, state: Any
  ) -> Changed:
    """Measures a fragment, and applies what is due on this step.

    Args:
      params: Parameters before the inner step.
      has_arrived: Whether the oldest pseudo-gradient in flight was sent ever.
      cut: The fragment.
      moving: What is to be added to `params`, and the correction.
      state: State of the fragment.
    """
    in_flight = state.in_flight
    num_arrived = 1
    if not self.schedule.depth:
      apply = self._at_once(params, moving, cut)
    elif self.schedule.is_whole_rounds:
      apply = self._if_arrived(params, moving, cut, has_arrived)
    else:
      # The oldest pseudo-gradient was applied in an earlier step.
      in_flight = in_flight[1:]
      num_arrived = 0
      apply = lambda state, own, fresh: (state, moving, None)  # noqa: E731
    state, moving, _ = events.measure_apply_send(
      self.outer,
      state,
      self._own(params, moving.updates, cut),
      in_flight=in_flight,
      apply=apply,
      num_arrived=num_arrived,
    )
    return moving, state

  def _apply(
    self, params: Tree, cut: Cut, moving: Moving, state: Any
  ) -> Changed:
    """Exchanges and applies a fragment that is not sent on this step."""
    arrived = self.outer.exchange(state, state.in_flight[0])
    state, own, result = events.apply_arrived(self.outer, arrived)(
      state,
      self._own(params, moving.updates, cut),
      events.no_measurement(state),
    )
    return self._moved_to(own, params, moving, cut, result), state

  def _at_once(self, params: Tree, moving: Moving, cut: Cut) -> events.Apply:
    """Returns what exchanges a new measurement and applies it at once."""

    def apply(state: Any, own: Tree, fresh: Tree) -> Any:
      at_once = events.exchange_at_once(self.outer)
      state, own, result = at_once(state, own, fresh)
      return state, self._moved_to(own, params, moving, cut, result), result

    return apply

  def _if_arrived(
    self, params: Tree, moving: Moving, cut: Cut, has_arrived: Array
  ) -> events.Apply:
    """Returns what exchanges and applies the oldest one in flight, if any."""

    def apply(state: Any, own: Tree, fresh: Tree) -> Any:
      def arrive(operand: Changed) -> Changed:
        moving, state = operand
        arrived = self.outer.exchange(state, state.in_flight[0])
        state, new, result = events.apply_arrived(self.outer, arrived)(
          state, own, fresh
        )
        return self._moved_to(new, params, moving, cut, result), state

      def nothing_yet(operand: Changed) -> Changed:
        moving, state = operand
        at_first = events.apply_nothing_yet(self.outer)
        state, new, _ = at_first(state, own, fresh)
        if new is own:
          return operand
        return self._moved_to(new, params, moving, cut, None), state

      operand = moving, state
      changed, state = jax.lax.cond(
        has_arrived, _like_given(arrive), _like_given(nothing_yet), operand
      )
      return state, changed, None

    return apply

  def _moved_to(
    self,
    own: Tree,
    params: Tree,
    moving: Moving,
    cut: Cut,
    result: ExchangeResult | None,
  ) -> Moving:
    """Returns what moves a fragment's parameters to new ones.

    Args:
      own: New parameters of the fragment.
      params: Parameters before the inner step.
      moving: What is to be added to them so far, and the correction.
      cut: The fragment.
      result: The exchange that has made them new; None if it was none.
    """
    # Updates may be wider than parameters, e.g. by `mu_dtype`.
    old = self.view.extract(params, *cut)
    like = self.view.extract(moving.updates, *cut)
    change = optax.tree.cast_like(optax.tree.sub(own, old), like)
    correction = moving.correction
    if correction is not None and result is not None:
      of_fragment = self.outer.correct(
        self.view.extract(correction, *cut), result
      )
      correction = self.view.insert(correction, *cut, of_fragment)
    return Moving(self.view.insert(moving.updates, *cut, change), correction)

  def _own(self, params: Tree, updates: Tree, cut: Cut) -> Tree:
    """The replica's own parameters of a fragment, after the inner step."""
    before, moved = (
      self.view.extract(tree, *cut) for tree in (params, updates)
    )
    return optax.apply_updates(before, moved)


def _fragment_at(schedule: SyncSchedule, send_step: Index) -> Index:
  """Returns the fragment that is sent after a step, or -1."""
  table = np.full(schedule.sync_interval, -1, np.int32)
  for fragment in range(schedule.num_fragments):
    table[schedule.offset(fragment)] = fragment
  return jnp.asarray(table)[send_step % schedule.sync_interval]


def check_axis(axis_name: str) -> None:
  """Raises ValueError if nobody binds the axis of the replicas."""
  try:
    jax.lax.axis_index(axis_name)
  except (NameError, AssertionError):
    raise ValueError(
      f"no axis is called {axis_name!r} here: map the step with jax.vmap(step, "
      f"axis_name={axis_name!r}) or with jax.shard_map over a mesh axis of "
      "this name, or pass the name of your axis as axis_name"
    ) from None


def _check_is_mapped(step: Array, axis_name: str) -> None:
  """Refuses a call that is not the code of one replica among others."""
  if step.ndim:
    raise ValueError(
      "the state has a replica axis: map the step with jax.vmap(step, "
      f"axis_name={axis_name!r}), or with jax.vmap(step) inside jax.shard_map"
    )
  check_axis(axis_name)


def _unchanged(operand: Operand) -> Operand:
  return operand


def _like_given(function: Callable) -> Callable:
  """Has a branch's results vary over the same mesh axes as what it is given.

  `jax.shard_map` types values by the axes over which they may differ, and all
  branches must have one type: the mean of an exchange is the same on all
  devices, the value it replaces need not be.
  """

  def run(operand):
    return jax.tree.map(varying_like, function(operand), operand)

  def varying_like(new: Array, old: Array) -> Array:
    axes = [frozenset(getattr(jax.typeof(x), "vma", ())) for x in (old, new)]
    missing = tuple(axes[0] - axes[1])
    return jax.lax.pcast(new, missing, to="varying") if missing else new

  return run


@custom_vmap
def _same_for_all(step: Index) -> Index:
  """The step counter, which is the same in all replicas.

  Under `jax.vmap` a conditional on a batched value runs both of its sides. The
  counter is batched like the rest of the state although its entries are equal,
  so its first entry stands for all. If one `jax.vmap` runs inside another, as
  for replicas of several runs, the outer one finds this function again.
  """
  return step


@_same_for_all.def_vmap
def _(axis_size, in_batched, step):
  del axis_size
  return (_same_for_all(step[0]) if in_batched[0] else step), False
