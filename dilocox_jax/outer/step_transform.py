"""DiLoCo and its relatives as an optax transform of one inner step.

The transform runs the inner optimizer. After some steps it also *sends* a
fragment (a part of the parameters): replicas measure their pseudo-gradients of
it. And it *applies* a fragment when the mean of its pseudo-gradients is due:
the mean changes the parameters. A `jax.lax.switch` chooses by the number of the
step what to do.

Fragments with equal shapes make a group (`FragmentView.groups`). The states of
a group's fragments are stacked, and the switch has one branch for each group.
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
from dilocox_jax.outer.event_tables import event_table
from dilocox_jax.outer.fragment_view import FragmentView
from dilocox_jax.outer.outer_step import FragmentState, OuterStep
from dilocox_jax.outer.rules import ExchangeResult
from dilocox_jax.outer.step_state import StepState
from dilocox_jax.trees import Array, Index, Tree, has_values


class Moves(NamedTuple):
  """Additions to a replica's parameters, as trees like the parameters.

  Attributes:
    updates: What this step adds to the parameters, as an optax transform
      returns it. The correction is already contained in these updates.
    correction: What every later inner step adds to its updates, until the
      correction changes (`ApplyRule.correct`). None: nothing.
  """

  updates: Tree
  correction: Tree | None


# What an event (a send or an apply) may change: what is added to a replica's
# parameters, and the states of all groups of fragments.
Operand = tuple[Moves, tuple[FragmentState, ...]]
# The same for one fragment: the additions, and the state of this fragment.
Changed = tuple[Moves, FragmentState]
# Which fragment: its group, and its index in it (`FragmentView.index`).
Cut = tuple[int, Any]


def pseudo_gradient_steps(
  outer: OuterStep, inner: optax.GradientTransformation, view: FragmentView
) -> optax.GradientTransformationExtraArgs:
  """Builds the optax transform of a method that averages pseudo-gradients.

  Args:
    outer: Measures, exchanges and applies pseudo-gradients.
    inner: Optimizer of the inner steps.
    view: Cuts fragments out of a tree like the parameters.

  Returns:
    A transform for the code of one replica, mapped over the axis
    `outer.axis_name`. Its state is a `StepState`. Its `init` raises ValueError
    if the parameters cannot be divided as `view` says. Its `update` raises
    ValueError if it does not get the parameters, or is not mapped.

  Raises:
    ValueError: If the schedule does not suit a transform of single steps, for
      example because it sends two fragments after one inner step
      (`outer.event_tables.event_table`).
  """
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
    moves, fragments = fragment_events.run(
      step, params, Moves(updates, state.correction), state.fragments
    )
    state = state._replace(
      step=step,
      inner=inner_state,
      fragments=fragments,
      correction=moves.correction,
    )
    return moves.updates, state

  return optax.GradientTransformationExtraArgs(init, update)


class _FragmentEvents:
  """Sends and applies fragments after an inner step, as the schedule says.

  A send measures the pseudo-gradient of a fragment, a part of the parameters.

  Attributes:
    outer: Measures, exchanges and applies pseudo-gradients.
    view: Cuts fragments out of a tree like the parameters.
    schedule: Says after which inner steps fragments are sent and applied.
    sends: Table of the fragment that is sent after each inner step.
    applies: Table of the fragment that is applied after each inner step.
    groups: Number of the group of every fragment, [P]. Fragments of a group
      have equal shapes.
    members: Numbers of the fragments of every group, ascending.
  """

  def __init__(self, outer: OuterStep, view: FragmentView):
    """Looks up the schedule's sends and applies, and groups the fragments."""
    self.outer = outer
    self.view = view
    self.schedule = outer.method.schedule
    self.sends = event_table(self.schedule, "send")
    self.applies = event_table(self.schedule, "apply")
    self.groups = view.groups
    self.members = [
      [p for p, group_of_p in enumerate(self.groups) if group_of_p == group]
      for group in range(max(self.groups) + 1)
    ]

  def init(self, params: Tree) -> tuple[FragmentState, ...]:
    """Returns the first outer state of every group of fragments."""
    # `optax.tree.map_params` calls init with a tree that has no leaves.
    if jax.tree.leaves(params):
      self.view.check(params)
    return tuple(self._first_state(params, group) for group in self.members)

  def _first_state(self, params: Tree, members: list[int]) -> FragmentState:
    """Returns the first outer state of a group, stacked over its fragments.

    A single fragment is not stacked. `in_flight` has `SyncSchedule.depth`
    placeholders of zeros.
    """

    def first_state(index: Any) -> FragmentState:
      values = self.view.extract(params, self.groups[members[0]], index)
      zeros = jax.tree.map(jnp.zeros_like, values)
      in_flight = (zeros,) * self.schedule.depth
      return self.outer.init(values)._replace(in_flight=in_flight)

    indices = self._indices(members)
    if len(members) == 1:
      return first_state(indices)
    return jax.vmap(first_state)(indices)

  def _indices(self, members: list[int]) -> Any:
    """Returns `FragmentView.index` of a fragment, or of several, stacked."""
    indices: list[Any] = [self.view.index(fragment) for fragment in members]
    if len(indices) == 1:
      return indices[0]
    return jnp.asarray(np.stack(indices))

  def run(
    self,
    step: Index,
    params: Tree,
    moves: Moves,
    fragments: tuple[FragmentState, ...],
  ) -> Operand:
    """Sends and applies fragments after an inner step, as the tables say.

    Args:
      step: Number of inner steps done, including this one.
      params: Parameters before the inner step.
      moves: The inner optimizer's updates, and the rule's correction.
      fragments: States of all groups of fragments.

    Returns:
      The new `moves` and the new states. The updates in `moves` turn `params`
      into the parameters after the inner step, the apply and the send.
    """
    operand = moves, fragments
    applied = self.applies.fragment_at(step)
    # If tau is a multiple of H, `_send` also applies.
    if not self.schedule.is_whole_rounds:
      apply = functools.partial(self._apply, params)
      operand = self._switch(applied, apply, operand)
    # The table applies a fragment only if the fragment was sent tau steps ago.
    was_sent = applied >= 0
    send = functools.partial(self._send, params, was_sent)
    return self._switch(self.sends.fragment_at(step), send, operand)

  def _switch(
    self, number: Index, event: Callable, operand: Operand
  ) -> Operand:
    """Sends or applies the fragment of a traced number, with `lax.switch`.

    If `number` is -1, nothing happens. `event` is a function (cut, moves, state
    of the fragment) -> (new moves, new state) that sends or applies. A cut is
    the fragment's group, and its index in the group.
    """
    _, fragments = operand
    branches = [_unchanged]
    for group, state in enumerate(fragments):
      change = functools.partial(self._change, event, group, number)
      # A fragment without values has nothing to send. For example, its only
      # leaf may have the shape [0].
      branches.append(change if has_values(state.params) else _unchanged)
    # Branch 0 changes nothing, so the branch of a group is its number + 1.
    index = jnp.where(number >= 0, jnp.asarray(self.groups)[number] + 1, 0)
    branches = [_varying_like_operand(branch) for branch in branches]
    return jax.lax.switch(index, branches, operand)

  def _change(
    self, event: Callable, group: int, number: Index, operand: Operand
  ) -> Operand:
    """Runs an event (a send or an apply) for one fragment of a group.

    In a branch that is not taken, `number` may be a fragment of another group.
    """
    moves, fragments = operand
    members = self.members[group]
    index = self._indices(members)
    state = fragments[group]
    row = 0  # Position of the fragment in the stacked state of its group.
    if len(members) > 1:
      row = jnp.clip(number - members[0], 0, len(members) - 1)
      take = jax.lax.dynamic_index_in_dim
      index = index[row]
      state = jax.tree.map(
        lambda leaf: take(leaf, row, axis=0, keepdims=False), state
      )
    moves, state = event((group, index), moves, state)
    if len(members) > 1:
      put = jax.lax.dynamic_update_index_in_dim
      state = jax.tree.map(
        lambda old, new: put(old, new, row, 0), fragments[group], state
      )
    return moves, (*fragments[:group], state, *fragments[group + 1 :])

  def _send(
    self, params: Tree, was_sent: Array, cut: Cut, moves: Moves, state: Any
  ) -> Changed:
    """Measures a pseudo-gradient; also applies a mean if H divides tau.

    With tau = 0, this is the mean of the new pseudo-gradients. With tau = H, 2
    H, ..., it is the mean of the oldest ones in flight. If `was_sent` is False,
    the oldest one in flight is only a placeholder of zeros. `moves` has the
    additions to `params` so far.
    """
    in_flight = state.in_flight
    num_arrived = 1
    # `depth` is the largest number of pseudo-gradients in flight: 0 if tau = 0.
    if not self.schedule.depth:
      apply = self._apply_at_once(params, moves, cut)
    elif self.schedule.is_whole_rounds:
      apply = self._apply_oldest(params, moves, cut, was_sent)
    else:
      # `_apply` has applied the oldest one on an earlier step, but has left it
      # in the state. It makes room for the new one.
      in_flight = in_flight[1:]
      num_arrived = 0
      apply = lambda state, inner, fresh: (state, moves, None)  # noqa: E731
    # `apply` returns `Moves` in place of the replica's new parameters.
    state, moves, _ = events.measure_apply_send(
      self.outer,
      state,
      self._inner_params(params, moves.updates, cut),
      in_flight=in_flight,
      apply=apply,
      num_arrived=num_arrived,
    )
    return moves, state

  def _apply(self, params: Tree, cut: Cut, moves: Moves, state: Any) -> Changed:
    """Averages and applies the fragment's oldest pseudo-gradient in flight.

    This serves a step after which the fragment is not sent. `moves` has the
    additions to `params` so far.
    """
    # The pseudo-gradient stays in the state until the next send removes it.
    arrived = self.outer.exchange(state, state.in_flight[0])
    state, inner, result = events.apply_arrived(self.outer, arrived)(
      state,
      self._inner_params(params, moves.updates, cut),
      events.no_measurement(state),
    )
    return self._moved_to(inner, params, moves, cut, result), state

  # The functions that `_apply_at_once` and `_apply_oldest` return give back
  # `Moves` in the place of the replica's new parameters.

  def _apply_at_once(
    self, params: Tree, moves: Moves, cut: Cut
  ) -> events.Apply:
    """Returns a function that averages pseudo-gradients and applies the mean.

    `events.measure_apply_send` calls the function if tau = 0.
    """

    def apply(state: Any, inner: Tree, fresh: Tree) -> Any:
      exchange_at_once = events.exchange_at_once(self.outer)
      state, inner, result = exchange_at_once(state, inner, fresh)
      return state, self._moved_to(inner, params, moves, cut, result), result

    return apply

  def _apply_oldest(
    self, params: Tree, moves: Moves, cut: Cut, was_sent: Array
  ) -> events.Apply:
    """Returns a function that averages and applies the oldest pseudo-gradient.

    `events.measure_apply_send` calls the function if tau is H, 2 H, ... If
    `was_sent` is False, the oldest one in flight is only a placeholder, and
    nothing changes, except under a rule that applies at the first send.
    """

    def apply(state: Any, inner: Tree, fresh: Tree) -> Any:
      def exchange_and_apply(operand: Changed) -> Changed:
        moves, state = operand
        arrived = self.outer.exchange(state, state.in_flight[0])
        state, new, result = events.apply_arrived(self.outer, arrived)(
          state, inner, fresh
        )
        return self._moved_to(new, params, moves, cut, result), state

      def apply_nothing_yet(operand: Changed) -> Changed:
        moves, state = operand
        apply_first = events.apply_nothing_yet(self.outer)
        state, new, _ = apply_first(state, inner, fresh)
        if new is inner:  # The rule does not apply at the first send.
          return operand
        return self._moved_to(new, params, moves, cut, None), state

      operand = moves, state
      new_moves, state = jax.lax.cond(
        was_sent,
        _varying_like_operand(exchange_and_apply),
        _varying_like_operand(apply_nothing_yet),
        operand,
      )
      return state, new_moves, None

    return apply

  def _moved_to(
    self,
    inner: Tree,
    params: Tree,
    moves: Moves,
    cut: Cut,
    result: ExchangeResult | None,
  ) -> Moves:
    """Returns the additions that give a fragment the parameters `inner`.

    They are `moves` with new updates of this fragment. If `result` is not None,
    the fragment's correction, if any, is also new.
    """
    old = self.view.extract(params, *cut)
    # Updates may have a wider dtype than the parameters, and must keep it.
    like = self.view.extract(moves.updates, *cut)
    change = optax.tree.cast_like(optax.tree.sub(inner, old), like)
    correction = moves.correction
    if correction is not None and result is not None:
      of_fragment = self.outer.correct(
        self.view.extract(correction, *cut), result
      )
      correction = self.view.insert(correction, *cut, of_fragment)
    updates = self.view.insert(moves.updates, *cut, change)
    return Moves(updates, correction)

  def _inner_params(self, params: Tree, updates: Tree, cut: Cut) -> Tree:
    """Returns the replica's parameters of a fragment, after the inner step."""
    return optax.apply_updates(
      self.view.extract(params, *cut), self.view.extract(updates, *cut)
    )


def check_axis(axis_name: str) -> None:
  """Raises ValueError if the code is not mapped over an axis of this name."""
  try:
    jax.lax.axis_index(axis_name)
  except (NameError, AssertionError):
    raise ValueError(
      f"no axis is called {axis_name!r} here: map the step with jax.vmap(step, "
      f"axis_name={axis_name!r}) or with jax.shard_map over a mesh axis of "
      "this name, or pass the name of your axis as axis_name"
    ) from None


def _check_is_mapped(step: Array, axis_name: str) -> None:
  """Raises ValueError unless the update is mapped over the replicas."""
  if step.ndim:
    raise ValueError(
      "the state has a replica axis: map the step with jax.vmap(step, "
      f"axis_name={axis_name!r}), or with jax.vmap(step) inside jax.shard_map"
    )
  check_axis(axis_name)


def _unchanged(operand: Operand) -> Operand:
  """Returns its argument: the branch of a step without a send or an apply."""
  return operand


def _varying_like_operand(function: Callable) -> Callable:
  """Wraps a branch so that its results have the same types as its argument.

  In `jax.shard_map` a type says over which mesh axes a value may differ
  ("varying"), and all branches of a conditional need the same types.
  """

  def run(operand):
    return jax.tree.map(varying_like, function(operand), operand)

  def varying_axes(value: Array) -> frozenset[str]:
    return frozenset(getattr(jax.typeof(value), "vma", ()))

  def varying_like(new: Array, old: Array) -> Array:
    missing = tuple(varying_axes(old) - varying_axes(new))
    return jax.lax.pcast(new, missing, to="varying") if missing else new

  return run


@custom_vmap
def _same_for_all(step: Index) -> Index:
  """Returns the step counter as a value that `jax.vmap` does not batch."""
  return step


@_same_for_all.def_vmap
def _(axis_size, in_batched, step):
  """Returns the first entry of the counter, and False: it is not batched."""
  # Under `jax.vmap`, a conditional on a batched value runs all of its branches.
  # All replicas have the same count, so the first entry stands for all. A
  # `jax.vmap` around this one applies this rule again.
  del axis_size
  is_batched = in_batched[0]
  step = _same_for_all(step[0]) if is_batched else step
  return step, False
