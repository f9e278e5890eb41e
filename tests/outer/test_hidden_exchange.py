"""Every turn of an exchange has inner steps between its send and its end."""

import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from dilocox_jax.outer.hidden_exchange import exchange_behind_steps
from dilocox_jax.plan.wire.collectives import PARTS


class Carry(NamedTuple):
  outer: Any
  step: Any


def outer_side(events, num_turns, ends):
  """Stands for an `OuterTransform`, and notes when it sends and receives."""

  def exchange_paused(state, index, own, weight):
    for turn in range(num_turns):
      own = yield own
      events.append(f"send {turn}")
      own = yield own + 1
      events.append(f"receive {turn}")
    return types.SimpleNamespace(params=1), own

  aggregator = types.SimpleNamespace(
    has_turns=True, stretch_ends=ends and (lambda params: ends)
  )
  partition = types.SimpleNamespace(take=lambda params, index: params)
  return types.SimpleNamespace(
    aggregator=aggregator, partition=partition, exchange_paused=exchange_paused
  )


def run(num_turns, ends):
  events = []

  def run_steps(carry, count):
    events.append(f"{int(count)} steps")
    return carry._replace(step=carry.step + count)

  outer: Any = outer_side(events, num_turns, ends)
  carry = Carry(types.SimpleNamespace(params=0), jnp.int32(3))
  carry, result = exchange_behind_steps(
    outer, run_steps, carry, 0, jnp.float32(0), jnp.int32(8)
  )
  return events, carry, result


def test_the_second_message_waits_for_the_first_and_for_its_steps():
  events, carry, result = run(2, (PARTS * 3 // 4, PARTS))
  assert events == [
    *("send 0", "6 steps", "receive 0"),
    *("send 1", "2 steps", "receive 1"),
  ]
  assert (carry.outer.params, carry.step, result) == (1, 3 + 8, 2)


def test_an_exchange_without_known_turns_has_all_steps():
  events, *_ = run(1, None)
  assert events == ["send 0", "8 steps", "receive 0"]


@pytest.mark.parametrize("ends", [None, (PARTS // 2, PARTS)])
def test_turns_that_nobody_told_of_come_after_the_steps(ends):
  events, carry, result = run(3, ends)
  assert events[-2:] == ["send 2", "receive 2"]
  assert (carry.outer.params, carry.step, result) == (1, 3 + 8, 3)


def test_a_turn_that_does_not_come_is_said_in_one_line():
  with pytest.raises(ValueError, match="of 2 turns, .* ends after 1") as raised:
    run(1, (PARTS // 2, PARTS))
  assert "\n" not in str(raised.value)


def test_the_loop_needs_what_is_sent_and_what_arrives_needs_the_loop():
  def program(own, step):
    outer: Any = outer_side([], 1, None)
    state = types.SimpleNamespace(params=0)

    def run_steps(carry, count):
      return carry._replace(step=carry.step * count)

    carry, result = exchange_behind_steps(
      outer, run_steps, Carry(state, step), 0, own, jnp.int32(8)
    )
    return carry.step, result

  text = str(jax.make_jaxpr(program)(jnp.float32(0), jnp.int32(1)))
  assert text.count("optimization_barrier") == 2
