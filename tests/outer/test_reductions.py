"""A method with some of its numbers at their neutral values is another one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.optimizers import named_optimizer
from dilocox_jax.plan.schedule import methods
from tests.oracles.least_squares import make_problem, to_vector
from tests.outer import nano
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


@pytest.mark.slow
@pytest.mark.parametrize(
  ("method", "settings"),
  [
    ("diloco", {}),
    ("delayed", {"overlap_steps": 2, "rule": "continue"}),
    ("dilocox", {"rule": "continue"}),
    ("eager", {}),
  ],
)
def test_one_transformer_is_trained_plainly_in_fp32(method, settings):
  alone: dict[str, Any] = {"num_steps": 12, "num_replicas": 1}
  outer = {"learning_rate": 1.0, "momentum": 0.0}
  settings |= {"method": method, "sync_interval": 4}
  programs, state, _ = nano.train(nano.config(outer=outer, **settings, **alone))
  state, _ = programs.rounds.flush(state)
  _, plain, _ = nano.train(nano.config(method="allreduce", **alone))
  assert distance(programs.rounds.outer_params(state), plain.params) < CLOSE


@pytest.mark.slow
def test_allreduce_of_a_transformer_is_one_replica_with_all_the_batches():
  settings = {"method": "allreduce", "num_steps": 8}
  many = nano.config(num_replicas=3, **settings)
  one = nano.config(num_replicas=1, batch_size=12, **settings)
  batches = nano.tokens(many)
  _, shared, _ = nano.train(many, batches)
  _, alone, _ = nano.train(one, np.concatenate(list(batches), axis=1)[None])
  assert distance(shared.params, alone.params) < CLOSE


def sgd_step(w, m, step):
  """One plain step of replica m, in numpy; `step` counts from 1."""
  inputs, targets = PROBLEM[1][m, step - 1], PROBLEM[2][m, step - 1]
  return w - 0.05 * inputs.T @ (inputs @ w - targets) / len(targets)


@pytest.mark.parametrize("delay", [1, 4, 6])
def test_continue_with_outer_sgd_lr_1_is_delayed_model_averaging(delay, x64):
  """w_m(s + tau) <- w_m(s + tau) + mean_k v_k(s) - v_m(s).

  v_m(s) is w_m(s) plus the corrections of m that are on their way at s: where
  it will be once they have arrived. For tau < H none is, and v is w.
  """
  w, waiting = [to_vector(PROBLEM[0])] * 3, []
  for step in range(1, STEPS + 1):
    w = [sgd_step(w[m], m, step) for m in range(3)]
    v = [w_m + sum(c[m] for _, c in waiting) for m, w_m in enumerate(w)]
    if waiting and waiting[0][0] + delay == step:
      w = [a + b for a, b in zip(w, waiting.pop(0)[1], strict=True)]
    if step % 4 == 0:
      waiting.append((step, [sum(v) / 3 - v_m for v_m in v]))
  method = methods.delayed(4, 1, delay, "continue")
  state, *_ = run_rounds(
    PROBLEM, method, SGD, AVERAGE, num_steps=STEPS, flush=False
  )
  params = jax.device_get(state.replica.params)
  for m in range(3):
    own = to_vector(jax.tree.map(lambda leaf, m=m: leaf[m], params))
    np.testing.assert_allclose(own, w[m], rtol=EXACT, atol=EXACT)
