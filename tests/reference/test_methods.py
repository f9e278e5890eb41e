"""The reference does what loops written out by hand do.

tests/outer holds the fast code to it, and to reductions to plain training.
"""

import numpy as np
import pytest

from dilocox_jax.reference import optimizers
from tests.oracles import least_squares

NUM_STEPS = 34
PROBLEM = least_squares.make_problem(
  seed=3, num_replicas=3, num_steps=NUM_STEPS, num_layers=5, width=3, batch=8
)
NESTEROV = optimizers.Sgd(0.5, momentum=0.6, nesterov=True)
AVERAGE = optimizers.Sgd(1.0)  # the outer step that goes to the mean


def train(rule, **changes):
  settings = {
    "sync_interval": 5,
    "num_fragments": 1,
    "fragment_order": "strided",
    "overlap_steps": 0,
    "mixing_alpha": 0.0,
    "inner": optimizers.AdamW(0.02),
    "outer": NESTEROV,
    "num_steps": NUM_STEPS,
  }
  return least_squares.train(*PROBLEM, rule=rule, **{**settings, **changes})


def distance(a, b):
  """Largest difference between two trees."""
  difference = least_squares.to_vector(a) - least_squares.to_vector(b)
  return np.max(np.abs(difference))


def farthest(a, b):
  """Largest difference between two lists of trees."""
  return max(distance(x, y) for x, y in zip(a, b, strict=True))


def inner_step(w, optimizer, m, step):
  """Plain training of one replica, for the loops written out below."""
  _, grads = least_squares.loss_and_grad(
    least_squares.join(w), PROBLEM[1][m][step - 1], PROBLEM[2][m][step - 1]
  )
  return optimizer.step(w, least_squares.split(grads))


def delayed_model_averaging(interval, delay):
  """w_m <- w_m + mean_k v_k(s) - v_m(s) at s + delay, with v_m(s) what
  w_m(s) will be when the corrections already on their way have arrived."""
  w = [least_squares.split(PROBLEM[0]) for _ in range(3)]
  inners = [optimizers.AdamW(0.02) for _ in range(3)]
  waiting = []
  for step in range(1, NUM_STEPS + 1):
    w = [inner_step(w[m], inners[m], m, step) for m in range(3)]
    correction = None
    if step % interval == 0:
      v = [dict(w_m) for w_m in w]
      for _, earlier in waiting:
        for m in range(3):
          v[m] = {n: v[m][n] + earlier[m][n] for n in v[m]}
      mean = {n: (v[0][n] + v[1][n] + v[2][n]) / 3 for n in v[0]}
      correction = [{n: mean[n] - v_m[n] for n in v_m} for v_m in v]
    if waiting and waiting[0][0] + delay == step:
      _, arrived = waiting.pop(0)
      for m in range(3):
        w[m] = {n: w[m][n] + arrived[m][n] for n in w[m]}
    if correction is not None:
      waiting.append((step, correction))
  return [least_squares.join(w_m) for w_m in w]


@pytest.mark.parametrize("delay", [1, 3, 5, 7, 12])
def test_continue_with_outer_sgd_lr_1_is_delayed_model_averaging(delay):
  run = train("continue", overlap_steps=delay, outer=AVERAGE, flush=False)
  assert farthest(run.params, delayed_model_averaging(5, delay)) < 1e-12


@pytest.mark.parametrize("rule", ["continue", "mix", "reset"])
def test_within_a_round_the_rules_differ_only_in_later_progress(rule):
  interval = 5
  delay = 2
  alpha = 0.3
  w = [least_squares.split(PROBLEM[0]) for _ in range(3)]
  inners = [optimizers.AdamW(0.02) for _ in range(3)]
  theta = dict(w[0])
  trace = {n: 0.0 for n in w[0]}
  sent = w
  for step in range(1, NUM_STEPS + 1):
    w = [inner_step(w[m], inners[m], m, step) for m in range(3)]
    if step > interval and step % interval == delay:
      for n in theta:
        delta = theta[n] - (sent[0][n] + sent[1][n] + sent[2][n]) / 3
        trace[n] = delta + 0.6 * trace[n]
        theta[n] = theta[n] - 0.5 * (delta + 0.6 * trace[n])
        for m in range(3):
          kept = {
            "continue": w[m][n] - sent[m][n],
            "mix": alpha * (w[m][n] - theta[n]),
            "reset": 0.0,
          }
          w[m][n] = theta[n] + kept[rule]
    if step % interval == 0:
      sent = [dict(w_m) for w_m in w]
  run = train(rule, overlap_steps=delay, mixing_alpha=alpha, flush=False)
  assert distance(run.theta, least_squares.join(theta)) < 1e-12
  assert farthest(run.params, [least_squares.join(w_m) for w_m in w]) < 1e-12


def recording_sgd(moved):
  """SGD that adds all it moves, over all its copies, to the dict `moved`."""

  class Recording(optimizers.Sgd):
    def step(self, params, grads):
      new = super().step(params, grads)
      for n in params:
        moved[n] = moved.get(n, 0.0) + params[n] - new[n]
      return new

  return Recording(0.05)


@pytest.mark.parametrize(
  ("rule", "overlap_steps"),
  [
    ("reset", 0),
    ("continue", 2),
    ("continue", 5),
    ("continue", 13),
    ("eager", 5),
  ],
)
@pytest.mark.parametrize("num_steps", [3, 10, NUM_STEPS])
def test_no_progress_is_lost_or_counted_twice(rule, overlap_steps, num_steps):
  moved = {}
  run = train(
    rule,
    num_fragments=3,
    overlap_steps=overlap_steps,
    inner=recording_sgd(moved),
    outer=AVERAGE,
    num_steps=num_steps,
  )
  start = least_squares.split(PROBLEM[0])
  end = least_squares.join({n: start[n] - moved[n] / 3 for n in start})
  thetas = run.theta if rule == "eager" else [run.theta]
  for theta in thetas:
    assert distance(theta, end) < 1e-12
  for params in run.params:
    assert distance(params, end) < 1e-12
