"""DiLoCo and its relatives as an optax transform of one inner step.

The transform holds everything: the inner optimizer's state, the outer
parameters, the outer optimizer's state, and what is in flight. A step without
an event of the schedule runs the inner optimizer alone; exchange and outer
step stand under a conditional.

The state of every fragment is an `OuterState` over the caller's tree, in which
`optax.MaskedNode()` stands for the leaves of other fragments, as in
`optax.masked`. So the code of `transforms` serves here unchanged, and optax's
functions for states, such as `optax.tree.map_params`, work.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.custom_batching import custom_vmap

from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.outer.partition import Partition
from dilocox_jax.outer.step_state import StepState, TreeDivision, with_piece
from dilocox_jax.outer.transforms import OuterState, OuterTransform
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.leaf_fragments import LeafFragment
from dilocox_jax.plan.schedule.methods import Method
from dilocox_jax.pytypes import Aggregator, Array, Boolean, Index, Tree
from dilocox_jax.trees import has_values, is_masked, path_name


def pseudo_gradient_steps(
  method: Method,
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  aggregator: Aggregator,
  divide: Callable[[Tree], Sequence[LeafFragment]],
  keep_unsent: bool = False,
  axis_name: str = REPLICA_AXIS,
) -> optax.GradientTransformationExtraArgs:
  """Builds the transform of a method that exchanges pseudo-gradients.

  Args:
    method: Schedule and rule.
    inner: Optimizer of the inner steps.
    outer: Optimizer of the outer parameters, applied to each fragment apart.
    aggregator: Averages one fragment over replicas.
    divide: From a tree to its fragments, one list of pieces for each.
    keep_unsent: As in `OuterTransform`.
    axis_name: Axis over which replicas are mapped.

  Raises:
    ValueError: If the rounds of the schedule differ in length.
  """
  if not method.schedule.is_regular:
    raise ValueError(
      "this schedule has rounds of different lengths, and a transform of "
      "single steps needs rounds of one length: take dilocox_jax.make_rounds"
    )
  inner = optax.with_extra_args_support(inner)
  transform = OuterTransform(
    method,
    Partition(Fragments(1, 1)),
    outer,
    aggregator,
    keep_unsent,
    axis_name,
  )

  def divided(params: Tree) -> Sequence[LeafFragment]:
    # `optax.tree.map_params` calls init with a tree that has no leaves.
    if not jax.tree.leaves(params):
      return [()] * method.schedule.num_fragments
    return divide(params)

  def init(params: Tree) -> Any:
    # Copies, so that parameters and state can both be donated to a step.
    copies = jax.tree.map(jnp.copy, params)
    return StepState(
      jnp.zeros((), jnp.int32),
      inner.init(params),
      tuple(
        transform.init(_take(copies, pieces)) for pieces in divided(params)
      ),
      TreeDivision(divide),
    )

  def update(updates, state, params=None, **extra):
    if params is None:
      raise ValueError(
        "update needs the parameters: tx.update(grads, state, params)"
      )
    _check_is_mapped(state.step, axis_name)
    updates, inner_state = inner.update(updates, state.inner, params, **extra)
    step = _same_for_all(state.step + 1)
    fragments = []
    for number, (pieces, kept) in enumerate(
      zip(divided(params), state.fragments, strict=True)
    ):
      before, change = _take(params, pieces), _take(updates, pieces)
      if has_values(before):  # One number in two slices leaves one empty.
        kept, change = _events(transform, number, step, kept, before, change)
        updates = _put(updates, pieces, change)
      fragments.append(kept)
    return updates, state._replace(
      step=step, inner=inner_state, fragments=tuple(fragments)
    )

  return optax.GradientTransformationExtraArgs(init, update)


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


def _events(
  transform: OuterTransform,
  number: int,
  step: Index,
  state: OuterState,
  before: Tree,
  change: Tree,
) -> tuple[OuterState, Tree]:
  """Runs what the schedule has for one fragment after one inner step.

  Args:
    transform: The outer side, for a tree that is one fragment.
    number: Which fragment.
    step: Inner steps done, this one included.
    state: The fragment's outer state.
    before: Its parameters before the inner step.
    change: What the inner optimizer adds to them.

  Returns:
    The new state, and what is to be added to `before`.
  """
  schedule = transform.method.schedule
  interval, tau = schedule.sync_interval, schedule.overlap_steps
  place = (step - schedule.offset(number)) % interval
  is_sent = place == 0
  send_step = step - tau
  is_applied = (place == tau % interval) & (send_step > 0)
  sent_slot = _slot(schedule, number, step)
  applied_slot = _slot(schedule, number, send_step)
  params = optax.apply_updates(before, change)

  def arrive(state: OuterState, params: Tree, own: Tree, fresh: Tree):
    state, result = transform.exchange(state, 0, own)
    state, params, _ = transform.apply(state, params, 0, result, fresh)
    return state, params

  def nothing_yet(state: OuterState, params: Tree, fresh: Tree):
    if not transform.rule.is_per_replica:
      return state, params
    result = transform.nothing(state, 0)
    state, params, _ = transform.apply(state, params, 0, result, fresh)
    return state, params

  def applied(state: OuterState, params: Tree):
    own = transform.in_flight(state, 0, applied_slot)
    return arrive(state, params, own, jax.tree.map(jnp.zeros_like, own))

  def sent(state: OuterState, params: Tree):
    unapplied = transform.unapplied_at_send(sent_slot)
    fresh = transform.measure(state, params, 0, unapplied)
    if not transform.depth:
      return arrive(state, params, fresh, fresh)
    if schedule.is_whole_rounds:  # Measured, then applied, then sent.
      own = transform.in_flight(state, 0, applied_slot)
      state, params = _cond(
        is_applied,
        lambda state, params: arrive(state, params, own, fresh),
        lambda state, params: nothing_yet(state, params, fresh),
        state,
        params,
      )
    return transform.send(state, 0, sent_slot, fresh), params

  new = params
  if not schedule.is_whole_rounds:
    state, new = _cond(is_applied, applied, _unchanged, state, new)
  state, new = _cond(is_sent, sent, _unchanged, state, new)
  # A step without an apply returns the inner optimizer's own update: adding
  # and subtracting parameters would round it.
  has_moved = is_sent if schedule.is_whole_rounds else is_applied
  change = jax.tree.map(
    lambda old, after, given: jnp.where(has_moved, after - old, given),
    before,
    new,
    change,
  )
  return state, change


def _slot(schedule, number: int, send_step: Index) -> Index:
  """The slot of what was sent after a step; see `SyncSchedule.slot`."""
  if not schedule.depth:
    return jnp.zeros_like(send_step)
  sends = (send_step - schedule.offset(number)) // schedule.sync_interval
  return sends % schedule.depth


def _unchanged(state: OuterState, params: Tree):
  return state, params


def _cond(is_true: Boolean, yes, no, state: OuterState, params: Tree):
  """`jax.lax.cond` whose results vary over the same axes on both sides."""

  def like(function):
    def run(state, params):
      out = function(state, params)
      return jax.tree.map(_varying_like, out, (state, params))

    return run

  return jax.lax.cond(is_true, like(yes), like(no), state, params)


def _varying_like(new: Array, old: Array) -> Array:
  """Marks a value as varying over the axes over which another one varies.

  `jax.shard_map` types values by the axes over which they may differ, and
  both sides of a conditional must have one type: the mean of an exchange is
  the same on all devices, the value it replaces need not be.
  """
  missing = _varying_axes(old) - _varying_axes(new)
  return jax.lax.pcast(new, tuple(missing), to="varying") if missing else new


def _varying_axes(value: Array) -> frozenset:
  return frozenset(getattr(jax.typeof(value), "vma", ()))


@custom_vmap
def _same_for_all(step: Index) -> Index:
  """The step counter, which is the same in all replicas.

  Under `jax.vmap` a conditional on a batched value runs both of its sides. The
  counter is batched like the rest of the state although its entries are equal,
  so its first entry stands for all.
  """
  return step


@_same_for_all.def_vmap
def _(axis_size, in_batched, step):
  del axis_size
  return (step[0] if in_batched[0] else step), False


def _take(tree: Tree, pieces: LeafFragment) -> Tree:
  """Returns the tree with a `MaskedNode` for every leaf of other fragments."""
  own = {piece.path: piece for piece in pieces}

  def take(path, leaf):
    piece = own.get(path_name(path))
    if piece is None or piece.layers is None:
      return leaf if piece else optax.MaskedNode()
    rows = jnp.asarray(piece.layers, jnp.int32)
    return jnp.take(leaf, rows, axis=piece.axis, mode="fill", fill_value=0)

  return jax.tree_util.tree_map_with_path(take, tree)


def _put(tree: Tree, pieces: LeafFragment, values: Tree) -> Tree:
  """Returns the tree with the leaves of a fragment replaced by its values."""
  own = {piece.path: piece for piece in pieces}

  def put(path, new, old):
    piece = own.get(path_name(path))
    return with_piece(old, piece, new) if piece else old

  return jax.tree_util.tree_map_with_path(put, values, tree, is_leaf=is_masked)
