"""A method with some of its numbers at their neutral values is another one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.optimizers import named_optimizer
from dilocox_jax.plan.schedule import methods
from tests.oracles.least_squares import make_problem
from tests.outer import nano
from tests.outer.problem import (
  assert_close,
  assert_equal,
  begin,
  loss,
  nesterov,
  run_rounds,
  run_steps,
  walk,
)

EXACT = 1e-12  # float64; sums of a few hundred terms near 1
CLOSE = 1e-6  # fp32, relative to the norm of a leaf; 16 units of rounding
STEPS = 24
AVERAGE = optax.sgd(1.0)
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
  ("name", "special", "general"),
  [
    (
      "streaming in one part, at once, without mixing is diloco",
      methods.diloco(4),
      methods.streaming_diloco(4, 1, 0, 0.0),
    ),
    (
      "reset without delay is diloco",
      methods.diloco(4),
      methods.delayed(4, 1, 0, "reset"),
    ),
    (
      "continue without delay is diloco",
      methods.diloco(4),
      methods.delayed(4, 1, 0, "continue"),
    ),
    (
      "streaming at once without mixing is reset without delay",
      methods.delayed(4, 3, 0, "reset"),
      methods.streaming_diloco(4, 3, 0, 0.0),
    ),
  ],
)
def test_neutral_numbers_change_no_bit(name, special, general):
  problem = in_fp32(PROBLEM)
  settings = {"num_steps": STEPS, "flush": False}
  inner = named_optimizer("adamw", 0.02)
  one = run_rounds(problem, special, inner, nesterov(), **settings)
  two = run_rounds(problem, general, inner, nesterov(), **settings)
  assert_equal(one[0], two[0])
  np.testing.assert_array_equal(one[1], two[1])


KEEPS_ALL = {
  "diloco": methods.diloco(4),
  "dilocox": methods.dilocox(4, "continue"),
  "eager": methods.eager(4),
  "delayed": methods.delayed(4, 3, 2, "continue"),
  "delayed over a round": methods.delayed(4, 1, 6, "continue"),
}


def plain_training(problem, optimizer):
  """One replica's steps with nothing around them."""
  (params, inputs, targets) = jax.tree.map(jnp.asarray, problem)

  @jax.jit
  def step(params, state, batch):
    updates, state = optimizer.update(
      jax.grad(loss)(params, batch), state, params
    )
    return optax.apply_updates(params, updates), state

  state = optimizer.init(params)
  for batch in zip(inputs[0], targets[0], strict=True):
    params, state = step(params, state, batch)
  return params


@pytest.mark.parametrize("name", KEEPS_ALL)
def test_one_replica_with_outer_sgd_lr_1_is_plain_training(name, x64):
  momentum = optax.sgd(0.05, momentum=0.9)
  state, _, programs = run_rounds(
    ALONE, KEEPS_ALL[name], momentum, AVERAGE, num_steps=STEPS
  )
  plain = plain_training(ALONE, momentum)
  assert_close(programs.outer_params(state), first(state), EXACT)
  assert_close(programs.outer_params(state), plain, EXACT)


def first(state):
  return jax.tree.map(lambda leaf: leaf[0], state.replica.params)


@pytest.mark.parametrize("name", ["diloco", "delayed over a round"])
def test_one_replica_is_plain_training_in_fp32(name):
  # Momentum would multiply a rounding error before it damps it.
  sgd, problem = optax.sgd(0.05), in_fp32(ALONE)
  state, _, programs = run_rounds(
    problem, KEEPS_ALL[name], sgd, AVERAGE, num_steps=STEPS
  )
  found = programs.outer_params(state)
  assert distance(found, plain_training(problem, sgd)) < CLOSE


@pytest.mark.parametrize(
  ("method", "settings"),
  [
    pytest.param("diloco", {}, marks=pytest.mark.slow),
    pytest.param(
      "delayed",
      {"overlap_steps": 2, "rule": "continue"},
      marks=pytest.mark.slow,
    ),
    pytest.param("dilocox", {"rule": "continue"}, marks=pytest.mark.slow),
    pytest.param("eager", {}, marks=pytest.mark.slow),
  ],
)
def test_one_transformer_is_trained_plainly_in_fp32(method, settings):
  alone: dict[str, Any] = {"num_steps": 12, "num_replicas": 1}
  outer = {"learning_rate": 1.0, "momentum": 0.0}
  programs, state, _ = nano.train(
    nano.config(
      method=method, sync_interval=4, outer=outer, **settings, **alone
    )
  )
  state, _ = programs.rounds.flush(state)
  _, plain, _ = nano.train(nano.config(method="allreduce", **alone))
  ours = programs.rounds.outer_params(state)
  assert distance(ours, plain.params) < CLOSE


@pytest.mark.parametrize("bits", [64, 32])
def test_averaging_every_sgd_step_is_data_parallel(bits):
  with jax.enable_x64(bits == 64):
    problem = PROBLEM if bits == 64 else in_fp32(PROBLEM)
    sgd = optax.sgd(0.05)
    state, losses, programs = run_rounds(
      problem, methods.diloco(1), sgd, AVERAGE, num_steps=STEPS
    )
    steps, seen = run_steps(problem, sgd, num_steps=STEPS)
    found = programs.outer_params(state)
    assert distance(found, steps.params) < (EXACT if bits == 64 else CLOSE)
    assert distance(losses, seen) < CLOSE


def joined(problem):
  """The problem with all replicas' batches given to one."""
  params, inputs, targets = problem
  return (
    params,
    np.concatenate(list(inputs), axis=1)[None],
    np.concatenate(list(targets), axis=1)[None],
  )


@pytest.mark.parametrize("bits", [64, 32])
def test_allreduce_is_one_replica_with_all_the_batches(bits):
  with jax.enable_x64(bits == 64):
    problem = PROBLEM if bits == 64 else in_fp32(PROBLEM)
    optimizer = nesterov(0.05, 0.9)
    many, losses = run_steps(problem, optimizer, num_steps=STEPS)
    one, loss = run_steps(joined(problem), optimizer, num_steps=STEPS)
    assert distance(many.params, one.params) < (EXACT if bits == 64 else CLOSE)
    assert distance(np.mean(losses, axis=0), loss[0]) < CLOSE


@pytest.mark.slow
def test_allreduce_of_a_transformer_is_one_replica_with_all_the_batches():
  many = nano.config(method="allreduce", num_steps=8, num_replicas=3)
  one = nano.config(
    method="allreduce", num_steps=8, num_replicas=1, batch_size=12
  )
  batches = nano.tokens(many)
  _, shared, _ = nano.train(many, batches)
  _, alone, _ = nano.train(one, np.concatenate(list(batches), axis=1)[None])
  assert distance(shared.params, alone.params) < CLOSE


def sgd_steps(problem, w, m, step):
  """One plain step of replica m, in numpy; `step` counts from 1."""
  _, inputs, targets = problem
  error = inputs[m, step - 1] @ w[m] - targets[m, step - 1]
  return w[m] - 0.05 * inputs[m, step - 1].T @ error / len(error)


def to_vectors(params, num_replicas):
  """Leaves [M, ...] laid end to end, [M, dim]."""
  blocks = params["blocks"]
  leaves = [params["embed"], blocks["w"], blocks["b"], params["head"]]
  return np.concatenate(
    [np.reshape(leaf, [num_replicas, -1]) for leaf in leaves], axis=1
  )


def starts(problem):
  one = to_vectors(jax.tree.map(lambda x: x[None], problem[0]), 1)[0]
  return [one.copy() for _ in problem[1]]


def delayed_model_averaging(problem, interval, delay):
  """w_m(s + tau) <- w_m(s + tau) + mean_k v_k(s) - v_m(s).

  v_m(s) is w_m(s) plus the corrections of m that are on their way at s: where
  it will be once they have arrived. For tau < H none is, and v is w.
  """
  w, waiting = starts(problem), []
  for step in range(1, STEPS + 1):
    w = [sgd_steps(problem, w, m, step) for m in range(len(w))]
    v = [w_m + sum(c[m] for _, c in waiting) for m, w_m in enumerate(w)]
    if waiting and waiting[0][0] + delay == step:
      arrived = waiting.pop(0)[1]
      w = [w_m + c for w_m, c in zip(w, arrived, strict=True)]
    if step % interval == 0:
      waiting.append((step, [sum(v) / len(v) - v_m for v_m in v]))
  return np.stack(w)


@pytest.mark.parametrize("delay", [1, 3, 4, 6, 8])
def test_continue_with_outer_sgd_lr_1_is_delayed_model_averaging(delay, x64):
  method = methods.delayed(4, 1, delay, "continue")
  state, _, _ = run_rounds(
    PROBLEM, method, optax.sgd(0.05), AVERAGE, num_steps=STEPS, flush=False
  )
  np.testing.assert_allclose(
    to_vectors(state.replica.params, 3),
    delayed_model_averaging(PROBLEM, 4, delay),
    rtol=EXACT,
    atol=EXACT,
  )


@pytest.mark.parametrize("delay", [1, 3])
def test_within_a_round_continue_carries_later_progress_over(delay, x64):
  """w_m <- theta_new + (w_m(s + tau) - w_m(s)), outer steps of Nesterov."""
  w = starts(PROBLEM)
  theta, trace, sent = w[0], np.zeros_like(w[0]), None
  for step in range(1, STEPS + 1):
    w = [sgd_steps(PROBLEM, w, m, step) for m in range(3)]
    if sent is not None and step % 4 == delay:
      delta = theta - sum(sent) / 3
      trace = delta + 0.6 * trace
      theta = theta - 0.7 * (delta + 0.6 * trace)
      w = [theta + (w_m - s_m) for w_m, s_m in zip(w, sent, strict=True)]
    if step % 4 == 0:
      sent = w
  method = methods.delayed(4, 1, delay, "continue")
  programs, state = begin(PROBLEM, method, optax.sgd(0.05), nesterov())
  *_, (_, state, _) = walk(programs, state, PROBLEM, STEPS)
  np.testing.assert_allclose(
    to_vectors(state.replica.params, 3), np.stack(w), rtol=EXACT, atol=EXACT
  )
