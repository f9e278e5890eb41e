"""Growing rounds, a decaying outer rate and schedule-free outer steps."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import dilocox_jax as dx
from dilocox_jax.config import to_plan
from dilocox_jax.config.device_memory import num_copies
from dilocox_jax.optimizers import outer_rate_schedule
from dilocox_jax.outer.step_state import outer_params
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.reference import optimizers
from dilocox_jax.training import build
from tests import runs
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  EXACT,
  SGD,
  assert_close,
  assert_equal,
  nesterov,
  one_step,
  oracle,
  outer_tree,
  run_rounds,
  run_steps,
)

STEPS = 20
PROBLEM = make_problem(0, 3, STEPS, 4, 2, 3)
GROWING = methods.diloco(8, first_interval=2, steps_per_doubling=4)


def test_rounds_that_do_not_grow_train_as_rounds_of_one_length():
  """Bit for bit, with a flush in the middle of a round."""
  constant = methods.diloco(8)
  growing = methods.diloco(8, first_interval=8, steps_per_doubling=3)
  (state, losses, _), (other, other_losses, _) = (
    run_rounds(PROBLEM, method, SGD, nesterov(), num_steps=STEPS)
    for method in (constant, growing)
  )
  assert_equal(other, state)
  assert_equal(other_losses, losses)


def test_rounds_of_one_step_are_data_parallel_training_until_they_grow(x64):
  """With SGD inside, and outer steps to the mean."""
  method = methods.diloco(4, first_interval=1, steps_per_doubling=6)
  to_the_mean = optax.sgd(1.0)
  state, _, programs = run_rounds(
    PROBLEM, method, SGD, to_the_mean, num_steps=6
  )
  expected, _ = run_steps(PROBLEM, SGD, num_steps=6)
  assert_close(outer_tree(programs, state), expected.params, EXACT)
  # The control: with the next rounds, of 2 steps, they differ.
  state, _, programs = run_rounds(
    PROBLEM, method, SGD, to_the_mean, num_steps=10
  )
  expected, _ = run_steps(PROBLEM, SGD, num_steps=10)
  with pytest.raises(AssertionError):
    assert_close(outer_tree(programs, state), expected.params, 1e-6)


def test_the_bytes_of_growing_rounds_are_those_of_their_exchanges():
  def sent(**sync):
    config = runs.settings(total_steps=16, **{"sync_interval": 8} | sync)
    plan = to_plan.run_plan(config)
    traffic = to_plan.traffic(config)
    assert traffic.flush_bytes(plan.schedule_step(16)) == 0
    once = traffic.exchange_bytes(0)
    total = sum(traffic.segment_bytes(each) for each in plan.segments())
    return total / once, traffic.gradient_bytes() / once

  # Rounds of 2, 2, 4 and 8 steps.
  growing = {"method": "diloco", "first_interval": 2, "steps_per_doubling": 4}
  assert sent(**growing)[0] == 4
  # A data-parallel step sends as much as an exchange in fp32.
  with_start, step = sent(method="diloco", warm_start_steps=8)
  assert (with_start, step) == (8 + 1, 1)


# A decaying outer rate.


def test_the_outer_rate_follows_the_inner_steps():
  plan = RunPlan(GROWING, 22, warm_start_steps=2)
  # Rounds of 2, 2, 4, 8 and 4 steps.
  assert plan.round_starts() == [0, 0.1, 0.2, 0.4, 0.8]
  rate = outer_rate_schedule("cosine", 2.0, plan.round_starts(), 0.25)
  shares = [(1 + math.cos(math.pi * s)) / 2 for s in plan.round_starts()]
  expected = [2 * (0.25 + 0.75 * share) for share in shares]
  found = np.asarray([rate(count) for count in (*range(5), 9)])
  # The last one is in the flush.
  assert found == pytest.approx([*expected, expected[-1]])


def test_with_rounds_of_one_length_the_rate_is_the_cosine_of_optax():
  starts = RunPlan(methods.diloco(4), 40).round_starts()
  rate = outer_rate_schedule("cosine", 0.7, starts, 0.1)
  expected = optax.cosine_decay_schedule(0.7, 10, 0.1)
  found, wanted = (
    np.asarray([each(count) for count in range(10)])
    for each in (rate, expected)
  )
  assert found == pytest.approx(wanted)


def test_a_decaying_outer_rate_equals_the_reference(x64):
  starts = RunPlan(GROWING, STEPS).round_starts()
  rate = outer_rate_schedule("cosine", 0.7, starts, 0.1)
  outer = optax.sgd(rate, momentum=0.6, nesterov=True)
  state, _, programs = run_rounds(PROBLEM, GROWING, SGD, outer, num_steps=STEPS)

  def rate_of_round(count):
    start = [0, 2, 4, 8, 16][count]
    return 0.7 * (0.1 + 0.9 * (1 + math.cos(math.pi * start / STEPS)) / 2)

  twin = optimizers.Sgd(rate_of_round, 0.6, nesterov=True)
  expected = oracle(PROBLEM, GROWING, STEPS, outer=twin)
  # The factors are computed in single precision.
  assert_close(outer_tree(programs, state), expected.theta, 1e-6)
  constant = oracle(PROBLEM, GROWING, STEPS)
  with pytest.raises(AssertionError):
    assert_close(outer_tree(programs, state), constant.theta, 1e-3)


def test_a_config_names_the_decay_and_a_constant_rate_is_a_number():
  config = runs.settings(
    total_steps=20,
    method="diloco",
    sync_interval=4,
    outer={"schedule": "cosine", "momentum": 0.0, "learning_rate": 1.0},
  )
  optimizer = build.outer_optimizer(config, config.outer.learning_rate)
  gradient = {"w": jnp.ones(1)}
  state = optimizer.init(gradient)
  moves = []
  for _ in range(5):
    updates, state = optimizer.update(gradient, state, gradient)
    moves.append(-float(updates["w"][0]))  # pyright: ignore
  expected = [(1 + math.cos(math.pi * n / 5)) / 2 for n in range(5)]
  assert moves == pytest.approx(expected)


# Schedule-free outer steps.


@dataclasses.dataclass
class ScheduleFree:
  """The paper's steps: z moves, x is the mean of z, and theta is y."""

  rate: float
  b1: float
  count: int = 0
  z: Any = None
  x: Any = None

  def step(self, params, grads):
    if self.z is None:
      self.z = dict(params)
      self.x = dict(params)
    self.count += 1
    y = {}
    for name in grads:
      self.z[name] = self.z[name] - self.rate * grads[name]
      self.x[name] = self.x[name] + (self.z[name] - self.x[name]) / self.count
      y[name] = (1 - self.b1) * self.z[name] + self.b1 * self.x[name]
    return y


def test_schedule_free_outer_steps_equal_the_papers(x64):
  outer = dx.schedule_free(optax.contrib.schedule_free_sgd(0.7, b1=0.8))
  state, _, programs = run_rounds(PROBLEM, GROWING, SGD, outer, num_steps=STEPS)
  expected = oracle(PROBLEM, GROWING, STEPS, outer=ScheduleFree(0.7, 0.8))
  assert_close(outer_tree(programs, state), expected.theta, 1e-10)
  # What is evaluated is x = (y - (1 - b1) z) / b1, and not y.
  (fragment,) = state.fragments
  kept = programs.outer_params(state)
  assert_equal(kept, fragment.optimizer.average)
  z = fragment.optimizer.optimizer.z
  x = jax.tree.map(lambda y, z: (y - 0.2 * z) / 0.8, fragment.params, z)
  assert_close(kept, x, 1e-12)
  with pytest.raises(AssertionError):
    assert_close(kept, expected.theta, 1e-6)


def test_a_transform_takes_schedule_free_outer_steps(x64):
  outer = dx.schedule_free(optax.contrib.schedule_free_sgd(0.7))
  # A transform cannot flush: the fourth round ends after step 16.
  state, _, programs = run_rounds(PROBLEM, GROWING, SGD, outer, num_steps=16)
  tx = dx.step_transform(GROWING, SGD, outer)
  params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), PROBLEM[0])
  own = jax.vmap(tx.init)(params)
  program = jax.jit(jax.vmap(one_step(tx), axis_name="replica"))
  for step in range(16):
    batch = PROBLEM[1][:, step], PROBLEM[2][:, step]
    params, own = program(params, own, batch)
  whole = jax.tree.map(lambda leaf: leaf[0], outer_params(own, params))
  assert_close(whole, programs.outer_params(state), 1e-10)


def test_a_config_names_schedule_free_outer_steps():
  config = runs.settings(
    method="diloco",
    outer={"optimizer": "schedule_free_sgd", "learning_rate": 0.7},
  )
  optimizer = build.outer_optimizer(config, config.outer.learning_rate)
  state = optimizer.init({"w": jnp.zeros(1)})
  params = {"w": jnp.zeros(1)}
  for gradient in (1.0, 2.0):
    updates, state = optimizer.update(
      {"w": jnp.full(1, gradient)}, state, params
    )
    params = optax.apply_updates(params, updates)
  # z is -0.7 and then -2.1; x is their mean.
  np.testing.assert_allclose(state.average["w"], [-1.4], rtol=1e-6)  # pyright: ignore


def test_schedule_free_outer_steps_keep_two_more_copies():
  plain, free = (
    num_copies(runs.settings(method="diloco", outer=outer))
    for outer in ({"momentum": 0.0}, {"optimizer": "schedule_free_sgd"})
  )
  assert free - plain == 2


REFUSED = {
  "schedule='cosine' has no end: take mode 'rank'": {
    "method": "dilocox",
    "exchange": {"codec": "low_rank(rank=2)", "feedback": 1.0},
    "adaptive": {"mode": "rank_and_interval"},
    "outer": {"schedule": "cosine"},
  },
  "take 'rank' instead.*rounds of one length": {
    "method": "dilocox",
    "first_interval": 1,
    "steps_per_doubling": 4,
    "exchange": {"codec": "low_rank(rank=2)", "feedback": 1.0},
    "adaptive": {"mode": "rank_and_interval"},
  },
  "needs no decay: set outer.schedule='constant'": {
    "method": "diloco",
    "outer": {"optimizer": "schedule_free_sgd", "schedule": "cosine"},
  },
  "keeps an average of its own: set outer.average_power=0": {
    "method": "diloco",
    "outer": {"optimizer": "schedule_free_sgd", "average_power": 4.0},
  },
  "outer.momentum=0.5 would be ignored": {
    "method": "diloco",
    "outer": {"optimizer": "schedule_free_sgd", "momentum": 0.5},
  },
  "outer.final_fraction=0.5 would be ignored": {
    "method": "diloco",
    "outer": {"final_fraction": 0.5},
  },
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_do_not_go_together_are_refused(message):
  with pytest.raises(ValueError, match=message):
    runs.settings(**REFUSED[message])


def test_optimizers_that_evaluate_the_wrong_parameters_are_refused():
  params = {"w": jnp.zeros(1)}
  with pytest.raises(ValueError, match="needs a schedule-free optimizer"):
    dx.schedule_free(optax.sgd(1.0)).init(params)
  rounds = dx.make_rounds(
    GROWING,
    lambda params, state, batch: (params, state, (0.0, 0.0)),
    optax.contrib.schedule_free_sgd(0.7),
    num_replicas=2,
  )
  with pytest.raises(ValueError, match=r"wrap it, dilocox_jax.schedule_free"):
    rounds.init(params, ())


def test_a_schedule_that_grows_for_too_long_is_refused_by_a_transform():
  method = methods.diloco(1024, first_interval=1, steps_per_doubling=10**6)
  with pytest.raises(ValueError, match="take dilocox_jax.make_rounds"):
    dx.step_transform(method, optax.sgd(1.0), optax.sgd(1.0))
