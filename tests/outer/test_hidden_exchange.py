"""Every turn of an exchange has inner steps between its send and its end."""

import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from dilocox_jax.outer.hidden_exchange import exchange_behind_steps
from dilocox_jax.plan.collective import PARTS


class Progress(NamedTuple):
  step: Any


STATE: Any = types.SimpleNamespace(params=None)


def outer_side(events, num_turns, ends):
  """Stands for an `OuterStep`, and notes when it sends and receives."""

  def exchange_paused(state, own, weight):
    for turn in range(num_turns):
      own = yield own
      events.append(f"send {turn}")
      own = yield own + 1
      events.append(f"receive {turn}")
    return own

  aggregator = types.SimpleNamespace(
    has_turns=True, stretch_ends=ends and (lambda params: ends)
  )
  return types.SimpleNamespace(
    aggregator=aggregator, exchange_paused=exchange_paused
  )


def run(num_turns, ends):
  events = []

  def run_steps(progress, count):
    events.append(f"{int(count)} steps")
    return Progress(progress.step + count)

  outer: Any = outer_side(events, num_turns, ends)
  num_steps: Any = 8
  progress, result = exchange_behind_steps(
    outer, run_steps, Progress(jnp.int32(3)), STATE, jnp.float32(0), num_steps
  )
  return events, progress.step, result


def test_the_second_message_waits_for_the_first_and_for_its_steps():
  events, step, result = run(2, (PARTS * 3 // 4, PARTS))
  assert events == [
    *("send 0", "6 steps", "receive 0"),
    *("send 1", "2 steps", "receive 1"),
  ]
  assert (step, result) == (3 + 8, 2)


def test_an_exchange_without_known_turns_has_all_steps():
  events, *_ = run(1, None)
  assert events == ["send 0", "8 steps", "receive 0"]


@pytest.mark.parametrize("ends", [None, (PARTS // 2, PARTS)])
def test_turns_that_nobody_told_of_come_after_the_steps(ends):
  events, step, result = run(3, ends)
  assert events[-2:] == ["send 2", "receive 2"]
  assert (step, result) == (3 + 8, 3)


def test_a_turn_that_does_not_come_is_said_in_one_line():
  with pytest.raises(ValueError, match="of 2 turns, .* ends after 1") as raised:
    run(1, (PARTS // 2, PARTS))
  assert "\n" not in str(raised.value)


def test_the_loop_needs_what_is_sent_and_what_arrives_needs_the_loop():
  def program(own, step):
    outer: Any = outer_side([], 1, None)

    def run_steps(progress, count):
      return Progress(progress.step * count)

    return exchange_behind_steps(
      outer, run_steps, Progress(step), STATE, own, jnp.int32(8)
    )

  text = str(jax.make_jaxpr(program)(jnp.float32(0), jnp.int32(1)))
  assert text.count("optimization_barrier") == 2
