"""A damaged shared state is found at the next event of its fragment.

The replica takes the newest snapshot, and all replicas end with equal bits.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dilocox_jax as dx
from dilocox_jax.mailbox_protocol.store import Store
from dilocox_jax.rounds.mailbox_runtime import MailboxRuntime
from tests.mailbox import apart
from tests.outer.problem import assert_equal
from tests.tiers import slow

DAMAGED_ROUND = 6


def one_value_times_256(leaf):
  value = np.argmin(np.abs(np.abs(leaf) - np.abs(leaf).mean()))
  return leaf.at[np.unravel_index(value, leaf.shape)].multiply(256.0)


def whole_leaf_by_one_percent(leaf):
  return leaf * jnp.float32(1.01)


DAMAGES = [one_value_times_256, whole_leaf_by_one_percent]


def with_damage(state, fragment, part, damage):
  """Damages the first leaf of the fragment's parameters or optimizer."""
  fragments = list(state.fragments)
  values = getattr(fragments[fragment], part)
  leaves, tree = jax.tree.flatten(values)
  leaves[0] = damage(leaves[0])
  values = jax.tree.unflatten(tree, leaves)
  fragments[fragment] = fragments[fragment]._replace(**{part: values})
  return state._replace(fragments=tuple(fragments))


def trained(store, name, number, rules, damage):
  """Trains a replica. Begins again from the snapshot where it has to.

  Args:
    store: The store.
    name: Name of the method.
    number: Number of the replica.
    rules: The rules of the exchange.
    damage: Function from the state after a round to a damaged one.

  Returns:
    Events before the damage, how often it began again, the events that it saw
    settled, and the parameters.
  """
  method, settings = apart.METHODS[name]
  exchange = dx.mailbox(
    store, name=f"r{number}", secret=apart.SECRET, rules=rules, **settings
  )
  rounds = apart.rounds_of(method, exchange, 1)
  assert isinstance(rounds.runtime, MailboxRuntime)
  params = apart.first_params()
  state = dx.join_rounds(rounds, params, apart.INNER.init(params))
  events_before = 0
  num_starts = 0
  is_damaged = False
  while True:
    step = int(state.step)
    if step == DAMAGED_ROUND * apart.H and not is_damaged:
      is_damaged = True
      events_before = rounds.runtime.client.event
      state = damage(state)
    try:
      if step >= apart.ROUNDS * apart.H:
        state, _ = rounds.flush(state)
        break
      # Who began again may be in the middle of a round, and runs to its end.
      end = (step // apart.H + 1) * apart.H
      points = apart.batches(3, step, end)
      points = jax.tree.map(lambda leaf: leaf[number : number + 1], points)
      state, *_ = rounds.run(state, points)
    except dx.ReplicaStaleError:
      num_starts += 1
      state = dx.join_rounds(rounds, params, apart.INNER.init(params))
  outer = jax.tree.map(np.asarray, rounds.outer_params(state))
  return events_before, num_starts, rounds.runtime.client.settled, outer


def trained_with_a_damaged_one(
  name, num_replicas, fragment, damage, part="params", damaged=1
):
  """Trains replicas of which one is damaged after round 6.

  Returns:
    Events before the damage; how often each replica began again; the reasons
    why messages were left out, by event; and the parameters.
  """
  store = Store("memory:///")
  rules = dataclasses.replace(
    apart.rules(num_replicas), snapshot_every=3, quorum=1, grace_s=30.0
  )

  def damaged_state(state):
    return with_damage(state, fragment, part, damage)

  found = apart.in_threads(
    lambda number: trained(
      store,
      name,
      number,
      rules,
      damaged_state if number == damaged else lambda state: state,
    ),
    num_replicas,
    store,
  )
  events_before = found[damaged][0]
  starts = [num_starts for _, num_starts, _, _ in found]
  params = [outer for *_, outer in found]
  # A replica that begins again sees some events a second time.
  _, _, settled, _ = found[0]
  left_out = {
    each["event"]: each["left_out"] for each in settled if each["left_out"]
  }
  return events_before, starts, left_out, params


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
  ("name", "fragment", "part"),
  [
    ("diloco", 0, "params"),
    ("overlap_loco", 1, "params"),
    *slow(("overlap_loco", 0, "params"), ("diloco", 0, "optimizer")),
    *slow(("dilocox", 0, "params"), ("streaming_diloco", 1, "optimizer")),
  ],
)
def test_one_of_three_is_found_and_healed(damage, name, fragment, part):
  events, starts, left_out, params = trained_with_a_damaged_one(
    name, 3, fragment, damage, part
  )
  num_fragments = 2 if name in ("overlap_loco", "streaming_diloco") else 1
  (event, reasons), *_ = left_out.items()
  assert events <= event < events + num_fragments
  assert list(reasons) == ["r1"]
  assert reasons["r1"].startswith("its shared state differs: block ")
  assert len(left_out) == 1 and starts == [0, 1, 0]
  assert_equal(params[1], params[0])
  assert_equal(params[2], params[0])


@pytest.mark.parametrize("damaged", [0, 1])
def test_of_two_both_take_the_snapshot(damaged):
  """Nobody knows which one is wrong. The snapshot is right."""
  events, starts, left_out, params = trained_with_a_damaged_one(
    "diloco", 2, 0, one_value_times_256, damaged=damaged
  )
  assert list(left_out) == [events] and set(left_out[events]) == {"r0", "r1"}
  assert starts == [1, 1]
  assert_equal(params[1], params[0])
