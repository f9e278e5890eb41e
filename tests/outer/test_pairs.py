"""Replicas that average in pairs, and what a pair sends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.aggregators.pairs import tournament
from dilocox_jax.aggregators.traffic import exchange_operations
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.plan.operations import Permute
from dilocox_jax.plan.schedule import methods
from dilocox_jax.reference import optimizers
from dilocox_jax.reference.pairs import train_in_pairs
from dilocox_jax.trees import leaves_by_path, nested
from tests.oracles import least_squares
from tests.outer.problem import (
  INNER_RATE,
  ROUNDED,
  assert_close,
  begin,
  nesterov,
  outer_params_by_transform,
  outer_tree,
  walk,
)
from tests.tiers import slow

INTERVAL = 3
STEPS = 5 * INTERVAL


@pytest.mark.parametrize("num_replicas", range(1, 9))
def test_every_two_replicas_meet_once_in_a_tournament(num_replicas):
  rounds = tournament(num_replicas)
  meetings = set()
  for partners in rounds:
    for one, other in enumerate(partners):
      assert partners[other] == one
      if one < other:
        assert (one, other) not in meetings
        meetings.add((one, other))
    waiting = [one for one, other in enumerate(partners) if one == other]
    assert len(waiting) == num_replicas % 2
  assert len(meetings) == num_replicas * (num_replicas - 1) // 2


def problem_of(num_replicas):
  return least_squares.make_problem(0, num_replicas, STEPS, 4, 2, 3)


def partners_of(num_replicas, seed, number):
  """The partners of an exchange, drawn as the exchange draws them."""
  rounds = tournament(num_replicas)
  key = jax.random.fold_in(jax.random.key(seed), number)
  key = jax.random.fold_in(key, 1)
  return rounds[int(jax.random.randint(key, (), 0, len(rounds)))]


def loss_and_gradient(params, batch):
  value, gradient = least_squares.loss_and_grad(nested(params), *batch)
  return value, leaves_by_path(gradient)


def twin(problem, seed):
  params, inputs, targets = problem
  count = len(inputs)
  batches = [
    list(zip(own, wanted, strict=True))
    for own, wanted in zip(inputs, targets, strict=True)
  ]
  return train_in_pairs(
    loss_and_gradient,
    leaves_by_path(params),
    batches,
    sync_interval=INTERVAL,
    inner=[optimizers.Sgd(INNER_RATE) for _ in range(count)],
    outer=[optimizers.Sgd(0.7, 0.6, nesterov=True) for _ in range(count)],
    partners_of=functools.partial(partners_of, count, seed),
  )


def by_rounds(problem, layout, exchange):
  programs, state = begin(
    problem,
    methods.diloco(INTERVAL),
    optax.sgd(INNER_RATE),
    nesterov(),
    layout,
    exchange,
  )
  for _, after, _ in walk(programs, state, problem, STEPS):
    state = after
  return programs, state


@pytest.mark.parametrize("num_replicas", [3, 4])
def test_pairs_equal_the_plain_loops_through_three_doors(num_replicas, x64):
  problem = problem_of(num_replicas)
  exchange = dx.exchange(collective="pairs", seed=7)
  expected = [nested(theta) for theta in twin(problem, seed=7)]
  expected = jax.tree.map(lambda *leaves: np.stack(leaves), *expected)
  for layout in ("stacked", "mesh"):
    programs, state = by_rounds(problem, layout, exchange)
    assert_close(outer_tree(programs, state), expected, ROUNDED)
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), expected)
    assert_close(programs.outer_params(state), mean, ROUNDED)
  assert_close(
    outer_params_by_transform(
      problem,
      methods.diloco(INTERVAL),
      optax.sgd(INNER_RATE),
      STEPS,
      aggregator=exchange,
    ),
    expected,
    ROUNDED,
  )
  spread = np.std(expected["head"], axis=0)
  assert spread.max() > 1e-4


def test_a_pair_whose_partner_diverges_keeps_its_own(x64):
  """What is not finite is left out, and the pair's other half goes on."""
  exchange = dx.exchange(collective="pairs")

  def one(value):
    params = {"w": jnp.zeros(3)}
    averaged = exchange.average({"w": value}, exchange.init(params), params)
    return averaged.mean["w"], averaged.sent["w"]

  values = jnp.asarray([[1.0, 2.0, 3.0], [np.nan, 0.0, 0.0]])
  mean, sent = jax.vmap(one, axis_name="replica")(values)
  np.testing.assert_array_equal(mean[0], values[0])
  np.testing.assert_array_equal(mean[1], values[0])
  assert np.isnan(sent[1]).all()


@pytest.mark.parametrize("layout", ["stacked", *slow("mesh")])
def test_a_codec_is_averaged_in_pairs_with_error_feedback(layout):
  problem = jax.tree.map(lambda x: np.asarray(x, np.float32), problem_of(4))
  exchange = dx.exchange("int(bits=4)", feedback=1.0, collective="pairs")
  programs, state = by_rounds(problem, layout, exchange)
  heads = np.asarray(outer_tree(programs, state)["head"])
  assert np.isfinite(heads).all() and heads.std(axis=0).max() > 1e-4
  residuals = np.asarray(state.fragments[0].exchange.residual["head"])
  assert np.abs(residuals).max() > 0


def test_a_pair_sends_one_message_however_many_replicas_there_are():
  shapes = {"w": (30, 20)}
  found = exchange_operations(Int(4), shapes, 3, collective="pairs")
  size = dx.encoded_bytes(Int(4), ((1, 30, 20),)) + 1
  assert found == [Permute(size)]
  assert [found[0].sent_bytes(count) for count in (1, 2, 9)] == [0, size, size]


def test_codecs_that_share_a_state_are_refused():
  with pytest.raises(ValueError, match="take a codec without low_rank"):
    dx.exchange("low_rank+int(bits=4)", collective="pairs")


def test_a_mailbox_refuses_pairs_in_one_line(tmp_path):
  with pytest.raises(ValueError, match="pairs") as error:
    dx.mailbox(tmp_path, name="a", secret=b"x" * 64, collective="pairs")
  assert "\n" not in str(error.value)
