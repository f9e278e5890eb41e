import dataclasses

import jax
import optax
import pytest

from dilocox_jax.config import from_mapping
from dilocox_jax.outer.exchange_thread import ExchangeThread
from dilocox_jax.plan.schedule import methods
from tests.oracles.least_squares import make_problem
from tests.outer import nano
from tests.outer.problem import (
  assert_equal,
  assert_rounded_alike,
  begin,
  nesterov,
  walk,
)

NUM_STEPS = 14  # Three rounds of four steps, and a half.
PROBLEM = make_problem(8, 3, NUM_STEPS, 4, 2, 3)
INNER = optax.sgd(0.05, momentum=0.9)
METHODS = {
  "tau = H": methods.delayed(4, 1, 4, "continue"),
  "tau below H": methods.delayed(4, 1, 2, "reset"),
  "tau above H": methods.delayed(4, 1, 6, "continue"),
  "fragments": methods.streaming_diloco(4, 3, 1),
  "a mean for each replica": methods.eager(4),
}


def run(programs, state):
  """The losses of every step, and the state after the flush."""
  losses = []
  for passed in walk(programs, state, PROBLEM, NUM_STEPS):
    _, state, metrics = passed
    losses.append(jax.device_get(metrics))
  return losses, programs.flush(state)


@pytest.mark.parametrize(
  ("name", "layout"),
  [
    *((name, "mesh") for name in METHODS),
    *(
      pytest.param(name, "stacked", marks=pytest.mark.slow) for name in METHODS
    ),
  ],
)
def test_rounds_have_the_same_bits_with_and_without_a_thread(name, layout):
  given = PROBLEM, METHODS[name], INNER, nesterov(), layout
  expected = run(*begin(*given))
  programs, state = begin(*given)
  thread = ExchangeThread()
  programs = dataclasses.replace(programs, thread=thread)
  assert_rounded_alike(run(programs, state), expected)
  assert thread.newly_exposed_s() > 0


def test_a_method_that_hides_nothing_needs_no_thread():
  given = PROBLEM, methods.diloco(4), INNER, nesterov()
  expected = run(*begin(*given))
  programs, state = begin(*given)
  thread = ExchangeThread()
  programs = dataclasses.replace(programs, thread=thread)
  assert_equal(run(programs, state), expected)
  assert thread.newly_exposed_s() == 0


def test_an_exchange_that_fails_ends_the_round():
  method = METHODS["tau = H"]
  programs, state = begin(PROBLEM, method, INNER, nesterov(), "mesh")
  programs = dataclasses.replace(programs, thread=ExchangeThread())
  (_, state, _), *_ = walk(programs, state, PROBLEM, 4)

  def fail(*_):
    raise RuntimeError("Gloo: connection closed by peer")

  object.__setattr__(programs, "_exchange", fail)
  with pytest.raises(RuntimeError, match="closed by peer"):
    list(walk(programs, state, PROBLEM, 8, start=4))


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_codec_of_two_messages_has_the_same_bits_too(num_stages):
  plain = nano.config(
    num_steps=NUM_STEPS,
    num_replicas=2,
    layout="mesh",
    model={"num_layers": 4},
    method="dilocox",
    rule="continue",
    sync_interval=4,
  ).to_mapping()
  plain["exchange"] |= {"codec": "low_rank(rank=2)+int(bits=4)"}
  plain["mesh"] |= {"num_stages": num_stages}
  results = {}
  for dispatch in ("round", "thread"):
    plain["mesh"]["exchange_dispatch"] = dispatch
    programs, state, metrics = nano.train(from_mapping(plain))
    assert bool(programs.rounds.thread) == (dispatch == "thread")
    results[dispatch] = jax.device_get((metrics, programs.rounds.flush(state)))
  assert_rounded_alike(results["thread"], results["round"])
