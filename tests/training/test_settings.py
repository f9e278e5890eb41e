"""Every setting of `inner`, `outer` and `exchange` reaches what is trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.config.sections import ExchangeConfig, InnerConfig, OuterConfig
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.reference.optimizers import polynomial_average
from dilocox_jax.training import build
from tests import runs
from tests.aggregators.problem import (
  NUM_REPLICAS,
  close,
  draw,
  every_replicas,
  named,
  replica,
)
from tests.oracles import config as oracle

EXACT = 1e-6  # fp32, values near 1
NUM_ROUNDS = 4


INT = "int(block_size=32)"
SENT = {"codec": INT, "collective": "all_gather"}
OWED = {**SENT, "feedback": 1.0}


def sent(codec):
  return {"codec": codec, "collective": "all_gather"}


def settings(outer=None, exchange=None, **kwargs):
  return runs.settings(
    method="diloco",
    sync_interval=1,
    total_steps=NUM_ROUNDS,
    num_replicas=NUM_REPLICAS,
    outer=outer,
    exchange=exchange,
    **kwargs,
  )


def fields(section):
  return {field.name for field in dataclasses.fields(section)}


# Whole rounds, whose local steps are given.

# What is changed, the changed setting last, and what it is otherwise.
SGD = {"optimizer": "sgd", "momentum": 0.6, "nesterov": True}
PLAIN = {**SGD, "nesterov": False}
OUTER = [
  ("optimizer", {**PLAIN, "learning_rate": 0.01, "optimizer": "adamw"}, "sgd"),
  ("learning_rate", {**SGD, "learning_rate": 0.3}, 0.7),
  ("momentum", {**SGD, "momentum": 0.8}, 0.6),
  ("momentum", {**SGD, "momentum": 0.0}, 0.6),
  ("nesterov", {**SGD, "nesterov": True}, False),
  ("nesterov", {**SGD, "nesterov": False}, True),
  ("average_power", {**SGD, "average_power": 2.0}, 0.0),
]
EXCHANGE = [
  ("codec", sent("e3m0"), INT),
  ("collective", {**SENT, "collective": "reduce_scatter"}, "all_gather"),
  ("feedback", {**SENT, "feedback": 1.0}, 0.0),
  ("feedback", {**SENT, "feedback": 0.0}, 1.0),
  ("feedback", {**SENT, "feedback": 0.6}, 1.0),
  ("keep_unsent", {**SENT, "keep_unsent": True}, False),
  ("against", {**OWED, "against": "mean"}, "own"),
]


@pytest.mark.parametrize(
  ("section", "cases"), [(OuterConfig, OUTER), (ExchangeConfig, EXCHANGE)]
)
def test_every_setting_of_the_rounds_has_a_case(section, cases):
  # Only extensions have other kinds: tests/extensions/gossip.py.
  assert {field for field, *_ in cases} == fields(section) - {"kind"}


def trained(config):
  """By round what is evaluated, and every replica's leaves [M, ...]."""
  programs = build.programs(config).rounds

  def given(params, state, batch):
    zero = jnp.float32(0.0)
    return jax.tree.map(jnp.subtract, params, batch), state, (zero, zero)

  programs = dataclasses.replace(programs, inner_step=given)
  state = programs.init(replica(draw(100)), ())
  for step in range(NUM_ROUNDS):
    batch = jax.tree.map(lambda leaf: leaf[:, None], draw(step))
    state, _, _ = programs.run(state, batch)
    # The next round uses the state up.
    yield named(programs.outer_params(state)), named(state.replica.params)


def expected(config):
  """The same in numpy."""
  start = named(replica(draw(100)))
  moves = [
    [named(replica(draw(step), m)) for m in range(NUM_REPLICAS)]
    for step in range(NUM_ROUNDS)
  ]
  rounds = list(oracle.rounds(config, start, moves))
  power = config.outer.average_power
  if not power:
    return rounds
  outer = [params for params, _ in rounds]
  return [
    (polynomial_average(outer[: number + 1], power), own)
    for number, (_, own) in enumerate(rounds)
  ]


def check_rounds(section, field, given, otherwise):
  config = settings(**{section: given})
  twin = expected(config)
  for found, (outer, own) in zip(trained(config), twin, strict=True):
    close(found[0], outer, EXACT)
    stacked = {n: np.stack([w[n] for w in own]) for n in outer}
    close(found[1], stacked, EXACT)
  # Without this one setting the twin ends elsewhere, far beyond rounding.
  other = expected(settings(**{section: {**given, field: otherwise}}))
  gap = [
    np.abs(a[name] - b[name]).max()
    for a, b in zip(
      (twin[-1][0], *twin[-1][1]), (other[-1][0], *other[-1][1]), strict=True
    )
    for name in a
  ]
  assert max(gap) > 1e-3


@pytest.mark.parametrize(("field", "outer", "otherwise"), OUTER)
def test_outer_steps_are_those_of_the_numpy_twin(field, outer, otherwise):
  check_rounds("outer", field, outer, otherwise)


@pytest.mark.parametrize(("field", "exchange", "otherwise"), EXCHANGE)
def test_what_was_lost_is_treated_as_in_the_numpy_twin(
  field, exchange, otherwise
):
  check_rounds("exchange", field, exchange, otherwise)


def test_methods_that_send_gradients_send_them_by_codec_and_with_feedback():
  config = runs.settings(
    method="cocktail_sgd",
    sync_interval=None,
    num_replicas=NUM_REPLICAS,
    inner=runs.MINUS_GRADIENT,
    exchange=OWED,
  )
  steps = dataclasses.replace(
    build.programs(config).steps,
    gradient=lambda params, batch: (jnp.float32(0.0), batch),
  )
  each = [draw(step) for step in range(NUM_ROUNDS)]
  gradients = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *each)
  start = replica(draw(100))
  state, _ = steps.steps(steps.init(start), gradients)
  exchange = oracle.lossy_mean(config.exchange, NUM_REPLICAS)
  twin = named(start)
  for values in each:
    own = [named(replica(values, m)) for m in range(NUM_REPLICAS)]
    mean, _ = exchange.average(own)
    twin = {name: leaf - mean[name] for name, leaf in twin.items()}
  close(named(state.params), twin, EXACT)


@pytest.mark.parametrize(
  "codec",
  [
    "random_mask(fraction=0.25)",
    "int(bits=4,rounding=stochastic)",
    "low_rank(rank=2)",
  ],
)
def test_chances_follow_from_the_runs_seed(codec):
  values, found = draw(), []
  for seed in (0, 0, 1):
    config = settings(exchange=sent(codec))
    config = dataclasses.replace(config, seed=seed)
    aggregator = build.programs(config).rounds.outer.aggregator
    state = every_replicas(aggregator.init(replica(draw())))
    over = Replicas(NUM_REPLICAS).map(aggregator.average, (0, 0), 0)
    mean, own, _ = jax.jit(over)(values, state)
    found.append(
      {**named(mean), **{f"own/{n}": x for n, x in named(own).items()}}
    )
  first, again, other = found
  for name in first:
    np.testing.assert_array_equal(again[name], first[name])
    if codec == "low_rank(rank=2)" and name.endswith("embed"):
      continue  # Sent as it is.
    assert np.mean(other[name] != first[name]) > 0.05, name


# Inner steps.

NUM_STEPS = 8
# Norms of the mean of 263 values are about 0.4, 7, 1, ...: some are clipped.
SIZES = 0.02 * np.asarray([1, 20, 3, 0.5, 50, 2, 8, 5], np.float32)
BASE = {"learning_rate": 0.05, "warmup_steps": 2}
PLAIN_SGD = {"optimizer": "sgd", "learning_rate": 0.05}
INNER = [
  ("optimizer", {"optimizer": "sgd"}),
  ("learning_rate", {"learning_rate": 0.02}),
  ("schedule", {"schedule": "wsd"}),
  ("schedule", {"schedule": "constant"}),
  ("warmup_steps", {"warmup_steps": 4}),
  ("final_fraction", {"final_fraction": 0.7}),
  ("clip_norm", {"clip_norm": 3.0}),
  ("clip_norm", {"clip_norm": 0.0}),
  ("b1", {"b1": 0.7}),
  ("b2", {"b2": 0.8}),
  ("weight_decay", {"weight_decay": 0.6}),
  ("momentum", {"momentum": 0.8, **PLAIN_SGD}),
]
# The mean over micro-batches is the mean over the batch: not seen in results.
UNSEEN = {"accumulate_steps"}


def test_every_setting_of_inner_steps_has_a_case():
  fields = {field.name for field in dataclasses.fields(InnerConfig)}
  assert {field for field, _ in INNER} | UNSEEN == fields


def of_steps(inner, **kwargs):
  return runs.settings(
    total_steps=NUM_STEPS,
    num_replicas=NUM_REPLICAS,
    inner={**BASE, **inner},
    **kwargs,
  )


def gradients():
  """The replicas' gradients of every step, leaves [M, steps, ...]."""
  each = [
    jax.tree.map(lambda leaf, size=size: size * leaf, draw(step))
    for step, size in enumerate(SIZES)
  ]
  return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *each)


def own_batch(params, batch):
  """A loss whose gradient is the batch itself."""
  del params
  return jnp.float32(0.0), batch


def after_steps(config):
  """The parameters after all steps on the mean gradient, in numpy."""
  params = named(replica(draw(100)))
  optimizer = oracle.Inner(config.inner, config.total_steps)
  for step in range(NUM_STEPS):
    mean = {
      name: leaf[:, step].mean(axis=0)
      for name, leaf in named(gradients()).items()
    }
    params = optimizer.step(params, mean)
  return params


def distance(one, other):
  return max(np.abs(one[name] - other[name]).max() for name in one)


@pytest.mark.parametrize(("field", "inner"), INNER)
def test_steps_are_those_of_the_numpy_twin_with_the_same_of_steps(field, inner):
  config = of_steps(inner)
  steps = build.programs(config).steps
  steps = dataclasses.replace(steps, gradient=own_batch)
  state, _ = steps.steps(steps.init(replica(draw(100))), gradients())
  found, twin = named(state.params), after_steps(config)
  close(found, twin, EXACT)
  # The twin without this one setting ends elsewhere, far beyond rounding.
  usual = {**dataclasses.asdict(InnerConfig()), **BASE}
  other = after_steps(of_steps({**inner, field: usual[field]}))
  assert distance(twin, other) > 1e-3


ALL_ADAMW = {"b1": 0.7, "b2": 0.8, "weight_decay": 0.6, "clip_norm": 0.3}
ALL_SGD = {**PLAIN_SGD, "momentum": 0.8, "clip_norm": 0.3}


@pytest.fixture(scope="module", name="gradient")
def gradient_fixture():
  """Nano's (params, batch) -> gradients, not made by the assembly."""
  model = build.programs(of_steps({})).model
  return jax.jit(jax.grad(model.loss))


@pytest.mark.parametrize("inner", [ALL_ADAMW, ALL_SGD])
def test_local_steps_of_a_round_are_those_of_the_numpy_twin(inner, gradient):
  num_steps = 3
  config = of_steps(inner, sync_interval=num_steps)
  programs = build.programs(config)
  shape = (NUM_REPLICAS, num_steps, 2, runs.SEQUENCE_LENGTH + 1)
  batches = np.random.default_rng(0).integers(0, 256, shape, dtype=np.int32)
  start = jax.jit(programs.model.init)(jax.random.key(0))
  # Of DiLoCoX the first round's local steps are all that replicas have done.
  state = programs.rounds.init(start, programs.steps.optimizer.init(start))
  state, _, _ = programs.rounds.run(state, batches)
  structure = jax.tree.structure(start)
  for m in range(NUM_REPLICAS):
    twin = oracle.Inner(config.inner, config.total_steps)
    params = before = named(start)
    for batch in batches[m]:
      leaves = [leaf.astype(np.float32) for leaf in params.values()]
      tree = jax.tree.unflatten(structure, leaves)
      params = twin.step(params, named(gradient(tree, batch)))
    found = named(replica(state.replica.params, m))
    # fp32 gradients of two programs; where they nearly vanish Adam's quotient
    # of them has few digits, so all leaves are taken together.
    error = sum(np.sum((found[n] - params[n]) ** 2) for n in params)
    moved = sum(np.sum((before[n] - params[n]) ** 2) for n in params)
    assert np.sqrt(error) < 1e-3 * np.sqrt(moved)


@pytest.mark.parametrize("accumulate_steps", [1, 5])
def test_a_batch_is_taken_in_as_many_parts_as_asked_for(accumulate_steps):
  config = of_steps(
    {"accumulate_steps": accumulate_steps}, data={"batch_size": 5}
  )
  programs = build.programs(config)
  start = jax.eval_shape(programs.model.init, jax.random.key(0))
  batch = jnp.zeros((5, runs.SEQUENCE_LENGTH + 1), jnp.int32)
  text = str(jax.make_jaxpr(programs.steps.gradient)(start, batch))
  # Nothing else in nano comes in fives.
  assert ("length=5" in text) == (accumulate_steps == 5)
