"""A method with some of its numbers at their neutral values is another one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.optimizers import named_optimizer
from dilocox_jax.plan.schedule import methods
from tests.oracles.least_squares import make_problem
from tests.outer.problem import (
  EXACT,
  assert_equal,
  loss,
  nesterov,
  run_rounds,
  run_steps,
)

CLOSE = 1e-6  # fp32, relative to the norm of a leaf; 16 units of rounding
STEPS = 24
AVERAGE, SGD = optax.sgd(1.0), optax.sgd(0.05)
PROBLEM = make_problem(2, 3, STEPS, 4, 2, 3)
ALONE = make_problem(3, 1, STEPS, 4, 2, 3)


def in_fp32(problem):
  return jax.tree.map(lambda x: np.asarray(x, np.float32), problem)


def distance(actual, expected):
  """Largest distance of a leaf from another, relative to its norm."""

  def relative(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)

  return max(jax.tree.leaves(jax.tree.map(relative, actual, expected)))


@pytest.mark.parametrize(
  ("special", "general"),
  [
    (methods.diloco(4), methods.streaming_diloco(4, 1, 0, 0.0)),
    (methods.diloco(4), methods.delayed(4, 1, 0, "continue")),
    (methods.delayed(4, 3, 0, "reset"), methods.streaming_diloco(4, 3, 0, 0.0)),
  ],
)
def test_neutral_numbers_change_no_bit(special, general):
  inner = named_optimizer("adamw", 0.02)
  given = {"num_steps": STEPS, "flush": False}
  one, two = (
    run_rounds(in_fp32(PROBLEM), method, inner, nesterov(), **given)[:2]
    for method in (special, general)
  )
  assert_equal(one, two)


def plain_training(problem, optimizer):
  """One replica's steps with nothing around them."""
  params, inputs, targets = jax.tree.map(jnp.asarray, problem)

  @jax.jit
  def step(params, state, batch):
    gradients = jax.grad(loss)(params, batch)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  state = optimizer.init(params)
  for batch in zip(inputs[0], targets[0], strict=True):
    params, state = step(params, state, batch)
  return params


@pytest.mark.parametrize(
  ("method", "bits"),
  [
    (methods.diloco(4), 32),
    (methods.dilocox(4, "continue"), 64),
    (methods.eager(4), 64),
    (methods.delayed(4, 3, 2, "continue"), 64),
    (methods.delayed(4, 1, 6, "continue"), 32),
  ],
  ids=["diloco", "dilocox", "eager", "delayed", "over a round"],
)
def test_one_replica_with_outer_sgd_lr_1_is_plain_training(method, bits):
  with jax.enable_x64(bits == 64):
    problem = ALONE if bits == 64 else in_fp32(ALONE)
    # Momentum would multiply a rounding error before it damps it.
    inner = optax.sgd(0.05, momentum=0.9 if bits == 64 else None)
    state, _, programs = run_rounds(
      problem, method, inner, AVERAGE, num_steps=STEPS
    )
    plain, near = plain_training(problem, inner), CLOSE if bits == 32 else EXACT
    assert distance(programs.outer_params(state), plain) < near
    own = jax.tree.map(lambda leaf: leaf[0], state.replica.params)
    assert distance(own, plain) < near


def joined(problem):
  """The problem with all replicas' batches given to one."""
  params, inputs, targets = problem
  return (
    params,
    np.concatenate(list(inputs), axis=1)[None],
    np.concatenate(list(targets), axis=1)[None],
  )


@pytest.mark.parametrize("bits", [64, 32])
def test_averages_at_every_step_are_one_replica_with_all_the_batches(bits):
  near = EXACT if bits == 64 else CLOSE
  with jax.enable_x64(bits == 64):
    problem = PROBLEM if bits == 64 else in_fp32(PROBLEM)
    one, loss = run_steps(joined(problem), SGD, num_steps=STEPS)
    many, losses = run_steps(problem, SGD, num_steps=STEPS)
    state, seen, programs = run_rounds(
      problem, methods.diloco(1), SGD, AVERAGE, num_steps=STEPS
    )
    assert distance(many.params, one.params) < near
    assert distance(np.mean(losses, axis=0), loss[0]) < CLOSE
    assert distance(programs.outer_params(state), many.params) < near
    assert distance(seen, losses) < CLOSE
