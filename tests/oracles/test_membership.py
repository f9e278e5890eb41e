"""Replicas that come and go, against the twin in which all are alike."""

import numpy as np
import pytest

from dilocox_jax.reference import methods, optimizers
from tests.oracles.least_squares import arguments, fragment_names, make_problem
from tests.oracles.membership import train_apart

M, H, STEPS = 3, 4, 22


def both(method, away=(), inner_steps=(H,) * M, num_replicas=M):
  problem = make_problem(1, num_replicas, STEPS, 4, 2, 3)
  loss, params, batches = arguments(*problem, STEPS)
  given = {
    "inner": optimizers.Sgd(lambda n: 0.05 / (1 + n), 0.3),
    "outer": optimizers.Sgd(0.7, 0.6, nesterov=True),
    "fragments": fragment_names(problem[0], 1, "strided"),
    "sync_interval": H,
    **method,
  }
  apart = train_apart(
    loss, params, batches, away=away, inner_steps=inner_steps, **given
  )
  return apart, methods.train(loss, params, batches, **given)


def distance(one, other):
  return max(np.abs(one[name] - other[name]).max() for name in other)


RULES = [
  {},
  {"overlap_steps": 4, "rule": "continue"},
  {"overlap_steps": 6, "rule": "continue"},
  {"overlap_steps": 2, "rule": "mix", "mixing_alpha": 0.3},
]


@pytest.mark.parametrize("method", RULES)
def test_replicas_that_are_all_alike_train_as_ever(method):
  apart, plain = both(method)
  assert distance(apart.theta, plain.theta) == 0
  np.testing.assert_array_equal(apart.losses, plain.losses)


@pytest.mark.parametrize("method", RULES)
def test_a_replica_that_is_never_there_is_as_good_as_none(method):
  away = [(2, r) for r in range(6)]
  apart, _ = both(method, away)
  pair = train_pair(method)
  assert distance(apart.theta, pair.theta) < 1e-12


def train_pair(method):
  """The first two of the three replicas alone."""
  params, inputs, targets = make_problem(1, M, STEPS, 4, 2, 3)
  given = arguments(params, inputs[:2], targets[:2], STEPS)
  return methods.train(
    *given,
    inner=optimizers.Sgd(lambda n: 0.05 / (1 + n), 0.3),
    outer=optimizers.Sgd(0.7, 0.6, nesterov=True),
    fragments=fragment_names(params, 1, "strided"),
    sync_interval=H,
    **method,
  )


def test_an_absence_and_a_slow_replica_do_change_the_end():
  apart, plain = both({}, [(1, 2)])
  assert distance(apart.theta, plain.theta) > 1e-3
  slow, _ = both({}, (), (H, H, 1))
  assert distance(slow.theta, plain.theta) > 1e-3
  assert (slow.losses[2] != 0).sum() == 5  # One step in each whole round.


def test_the_mean_is_weighted_by_steps():
  """One round: theta ends at the weighted mean of where the replicas are."""
  params, inputs, targets = make_problem(1, 2, 4, 4, 2, 3)
  loss, start, batches = arguments(params, inputs, targets, 4)
  found = train_apart(
    loss,
    start,
    batches,
    away=(),
    inner_steps=(4, 1),
    inner=optimizers.Sgd(0.05),
    outer=optimizers.Sgd(1.0),
    sync_interval=4,
    fragments=fragment_names(params, 1, "strided"),
  )
  ends = []
  for m, count in enumerate((4, 1)):
    w = dict(start)
    for step in range(count):
      _, gradient = loss(w, batches[m][step])
      w = optimizers.Sgd(0.05).step(w, gradient)
    ends.append(w)
  for name, leaf in found.theta.items():
    mean = (4 * ends[0][name] + ends[1][name]) / 5
    np.testing.assert_allclose(leaf, mean, rtol=1e-12)
