"""DiLoCo and its relatives as an optax transform of one inner step.

The transform holds everything: the inner optimizer's state, and for every
fragment the outer parameters, the outer optimizer's state, and what is in
flight. A step without an event of the schedule runs the inner optimizer alone;
exchange and outer step stand under one conditional.

Fragments of one group (`cuts`) have one state, stacked, and the conditional has
one branch for all of them.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_batching import custom_vmap

from dilocox_jax.outer.cuts import Cuts
from dilocox_jax.outer.outer_step import FragmentState, OuterStep, nothing
from dilocox_jax.outer.step_state import StepState
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule
from dilocox_jax.trees import Array, Index, Tree, has_values

# Changes of the parameters, and the states of all groups of fragments.
Operand = tuple[Tree, tuple[FragmentState, ...]]
Changed = tuple[Tree, FragmentState]  # And the state of one fragment.
Cut = tuple[int, Any]  # The group of a fragment, and its place in it.


def pseudo_gradient_steps(
  outer: OuterStep, inner: optax.GradientTransformation, cuts: Cuts
) -> optax.GradientTransformationExtraArgs:
  """Builds the transform of a method that exchanges pseudo-gradients.

  Args:
    outer: Measures, exchanges and applies a fragment.
    inner: Optimizer of the inner steps.
    cuts: Divides a tree into fragments.

  Raises:
    ValueError: If the rounds of the schedule differ in length.
  """
  if not outer.method.schedule.is_regular:
    raise ValueError(
      "this schedule has rounds of different lengths, and a transform of "
      "single steps needs rounds of one length: take dilocox_jax.make_rounds"
    )
  inner = optax.with_extra_args_support(inner)
  events = _Events(outer, cuts)

  def init(params: Tree) -> Any:
    # Copies, so that parameters and state can both be donated to a step.
    copies = jax.tree.map(jnp.copy, params)
    step, fragments = jnp.zeros((), jnp.int32), events.init(copies)
    return StepState(step, inner.init(params), fragments, cuts)

  def update(updates, state, params=None, **extra):
    if params is None:
      raise ValueError(
        "update needs the parameters: tx.update(grads, state, params)"
      )
    _check_is_mapped(state.step, outer.axis_name)
    updates, inner_state = inner.update(updates, state.inner, params, **extra)
    step = _same_for_all(state.step + 1)
    updates, fragments = events.run(step, params, updates, state.fragments)
    return updates, state._replace(
      step=step, inner=inner_state, fragments=fragments
    )

  return optax.GradientTransformationExtraArgs(init, update)


class _Events:
  """What the schedule has after an inner step, for one replica."""

  def __init__(self, outer: OuterStep, cuts: Cuts):
    self.outer, self.cuts = outer, cuts
    self.schedule = outer.method.schedule
    self.groups = cuts.groups
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
      self.cuts.check(params)
    return tuple(map(functools.partial(self._first, params), self.members))

  def _first(self, params: Tree, members: list[int]) -> FragmentState:
    """Returns the state of a group; what it has in flight is zeros.

    The newest of `depth` pseudo-gradients comes last, and a send drops the
    first one. It is applied when it is the first, and zeros before that.
    """

    def first(place: Any) -> FragmentState:
      own = self.cuts.take(params, self.groups[members[0]], place)
      zeros = jax.tree.map(jnp.zeros_like, own)
      in_flight = (zeros,) * self.schedule.depth
      return self.outer.init(own)._replace(in_flight=in_flight)

    places = self._places(members)
    return first(places) if len(members) == 1 else jax.vmap(first)(places)

  def _places(self, members: list[int]) -> Any:
    """Returns the place of a fragment, or of all of a group, stacked."""
    places: list[Any] = [self.cuts.place(fragment) for fragment in members]
    return places[0] if len(places) == 1 else jnp.asarray(np.stack(places))

  def run(
    self,
    step: Index,
    params: Tree,
    updates: Tree,
    fragments: tuple[FragmentState, ...],
  ) -> Operand:
    """Runs the events after a step.

    Args:
      step: Inner steps done, this one included.
      params: Parameters before the inner step.
      updates: What the inner optimizer adds to them.
      fragments: States of all groups of fragments.

    Returns:
      What is to be added to `params`, and the new states.
    """
    operand, overlap = (updates, fragments), self.schedule.overlap_steps
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
      event: Function (cut of the fragment, updates, its state) -> the last two.
      operand: What the event changes.
    """
    number, branches = _fragment_at(self.schedule, send_step), [_unchanged]
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
    (updates, fragments), members = operand, self.members[group]
    place, state, index = self._places(members), fragments[group], 0
    if len(members) > 1:
      index = jnp.clip(number - members[0], 0, len(members) - 1)
      take = jax.lax.dynamic_index_in_dim
      place = place[index]
      state = jax.tree.map(lambda leaf: take(leaf, index, 0, False), state)
    updates, state = event((group, place), updates, state)
    if len(members) > 1:
      put = jax.lax.dynamic_update_index_in_dim
      state = jax.tree.map(
        lambda old, new: put(old, new, index, 0), fragments[group], state
      )
    return updates, (*fragments[:group], state, *fragments[group + 1 :])

  def _send(
    self, params: Tree, has_arrived: Array, cut: Cut, updates: Tree, state: Any
  ) -> Changed:
    """Measures a fragment, and applies at once what is due on this step."""
    pending, left = state.in_flight, state.in_flight[1:]
    if not self.schedule.is_whole_rounds:
      pending = left
    own = self._own(params, updates, cut)
    fresh = self.outer.measure(state, pending, own)
    if not self.schedule.depth:
      return self._arrive(params, cut, fresh, fresh, (updates, state))
    if self.schedule.is_whole_rounds:  # Measured, then applied, then sent.
      given = params, cut, pending[0], fresh
      arrive, none = (
        _like_given(functools.partial(event, *given))
        for event in (self._arrive, self._none)
      )
      updates, state = jax.lax.cond(has_arrived, arrive, none, (updates, state))
    return updates, state._replace(in_flight=(*left, fresh))

  def _apply(self, params: Tree, cut: Cut, updates: Tree, state: Any):
    due = state.in_flight[0]
    fresh = jax.tree.map(jnp.zeros_like, due)
    return self._arrive(params, cut, due, fresh, (updates, state))

  def _arrive(self, params: Tree, cut: Cut, due: Tree, fresh: Tree, given):
    """Exchanges a pseudo-gradient and applies the result."""
    updates, state = given
    result, kept = self.outer.exchange(state, due)
    state = state._replace(exchange=kept)
    return self._take_up(params, cut, result, fresh, (updates, state))

  def _none(self, params: Tree, cut: Cut, due: Tree, fresh: Tree, given):
    """Applies zeros before anything has arrived, if the rule says so."""
    del due
    if not self.outer.rule.applies_at_first_send:
      return given
    result = nothing(given[1].params)
    return self._take_up(params, cut, result, fresh, given)

  def _take_up(self, params, cut: Cut, result, fresh, given) -> Changed:
    updates, state = given
    own = self._own(params, updates, cut)
    state, new = self.outer.apply(state, own, result, fresh)
    # Updates may be wider than parameters, e.g. by `mu_dtype`.
    old, like = (self.cuts.take(tree, *cut) for tree in (params, updates))
    change = optax.tree.cast_like(optax.tree.sub(new, old), like)
    return self.cuts.put(updates, *cut, change), state

  def _own(self, params: Tree, updates: Tree, cut: Cut) -> Tree:
    """The replica's own parameters of a fragment, after the inner step."""
    before, moved = (self.cuts.take(tree, *cut) for tree in (params, updates))
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
