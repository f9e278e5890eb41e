"""Every setting of `outer`, `exchange` and codecs reaches what is trained."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.codecs.named import CODECS as NAMES
from dilocox_jax.codecs.named import named_codec
from dilocox_jax.config.sections import ExchangeConfig, OuterConfig
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.reference.optimizers import polynomial_average
from dilocox_jax.training import build
from tests import runs
from tests.aggregators.problem import (
  NUM_REPLICAS,
  close,
  draw,
  every_replicas,
  mean_of,
  named,
  replica,
)
from tests.oracles import codecs
from tests.oracles import config as oracle

EXACT = 1e-6  # fp32, values near 1
NUM_ROUNDS = 4


def written(name, **settings):
  """A codec's text."""
  given = ",".join(f"{field}={value}" for field, value in settings.items())
  return f"{name}({given})"


INT = functools.partial(written, "int", block_size=32)
TOP_K = functools.partial(written, "top_k", fraction=0.2, block_size=40)
SENT = {"codec": INT(), "collective": "all_gather"}
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
  ("codec", sent("e3m0"), INT()),
  ("collective", {**SENT, "collective": "reduce_scatter"}, "all_gather"),
  ("feedback", {**SENT, "feedback": 1.0}, 0.0),
  ("feedback", {**SENT, "feedback": 0.0}, 1.0),
  ("feedback", {**SENT, "feedback": 0.6}, 1.0),
  ("keep_unsent", {**SENT, "keep_unsent": True}, False),
  ("against", {**OWED, "against": "mean"}, "own"),
  ("residual_dtype", {**OWED, "residual_dtype": "bfloat16"}, "float32"),
  ("residual_dtype", {**OWED, "residual_dtype": "int8"}, "float32"),
]


@pytest.mark.parametrize(
  ("section", "cases"), [(OuterConfig, OUTER), (ExchangeConfig, EXCHANGE)]
)
def test_every_setting_of_the_rounds_has_a_case(section, cases):
  # Only extensions have other kinds: tests/extensions/test_gossip.py.
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
    # Parameters move by minus the gradient.
    inner={
      "optimizer": "sgd",
      "learning_rate": 1.0,
      "schedule": "constant",
      "warmup_steps": 0,
      "clip_norm": 0.0,
    },
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


# One exchange, by every codec.

# A codec, and another one; without a name, the changed setting and its codec.
CODECS = [
  ("", "e3m0(block_size=32)", INT()),
  ("", TOP_K(), INT()),
  ("int.bits", INT(bits=8), INT()),
  ("int.bits", INT(bits=2), INT()),
  ("int.bits", INT(bits=1), INT()),
  ("int.scale", INT(scale="row"), INT()),
  ("int.scale", INT(scale="tensor"), INT()),
  ("int.block_size", INT(block_size=50), INT()),
  ("e3m0.block_size", "e3m0(block_size=50)", "e3m0(block_size=32)"),
  ("top_k.fraction", TOP_K(fraction=0.3), TOP_K()),
  ("top_k.block_size", TOP_K(block_size=60), TOP_K()),
]
# Each in a test of its own, below.
ALONE = {
  *("low_rank.rank", "low_rank.power_iterations", "random_mask.fraction"),
  *("local_low_rank.rank", "local_low_rank.power_iterations"),
  *("int.rounding", "top_k.indices"),
}


def test_every_setting_of_a_codec_has_a_case():
  settings = {
    f"{name}.{field}"
    for name in NAMES
    for field in fields(named_codec(name))
    # What adapts has room for another rank: tests/test_adaptive_runs.py.
    if field not in ("then", "dtype", "max_rank")
  }
  assert {field for field, *_ in CODECS if field} | ALONE == settings


@functools.cache
def exchange_of(config):
  """The jitted exchange of all replicas, and its first state."""
  aggregator = build.programs(config).rounds.outer.aggregator
  state = every_replicas(aggregator.init(replica(draw())))
  over = Replicas(NUM_REPLICAS).map(aggregator.average, (0, 0), 0)
  return jax.jit(over), state


def sent_in_turn(config, values, times=1):
  """(mean, own), flat and each [M, ...], of exchanges in a row."""
  update, state = exchange_of(config)
  for _ in range(times):
    mean, own, state = update(values, state)
    yield named(mean), named(own)


def means_of(config, values):
  twin = oracle.lossy_mean(config.exchange, NUM_REPLICAS)
  return twin.average([named(replica(values, m)) for m in range(NUM_REPLICAS)])


@pytest.mark.parametrize(("field", "codec", "otherwise"), CODECS)
def test_what_is_sent_is_what_the_numpy_twin_sends(field, codec, otherwise):
  del field
  config, values = settings(exchange=sent(codec)), draw()
  ((mean, own),) = sent_in_turn(config, values)
  twin_mean, twin_own = means_of(config, values)
  for m in range(NUM_REPLICAS):
    close(replica(mean, m), twin_mean, EXACT)
    close(replica(own, m), twin_own[m], EXACT)
  other, _ = means_of(settings(exchange=sent(otherwise)), values)
  assert any(np.abs(twin_mean[n] - other[n]).max() > 1e-3 for n in other)


@pytest.mark.parametrize(
  ("name", "rank", "power_iterations"),
  [
    ("low_rank", 2, 1),
    ("low_rank", 4, 1),
    ("low_rank", 2, 3),
    ("local_low_rank", 2, 1),
    ("local_low_rank", 4, 1),
    ("local_low_rank", 2, 3),
  ],
)
def test_factors_are_those_of_the_numpy_twin(name, rank, power_iterations):
  codec = written(name, rank=rank, power_iterations=power_iterations)
  config, values = settings(exchange=sent(codec)), draw()
  ((mean, own),) = sent_in_turn(config, values)
  matrices = named(values)["blocks/w"]
  _, state = exchange_of(config)
  if name == "low_rank":
    starts = np.asarray(state.codec.leaves["blocks/w"].right[0], np.float64)
    matrices = matrices.mean(axis=0, keepdims=True)
  else:
    start = jax.random.normal(jax.random.key(0), (10, rank))
    starts = [np.asarray(start, np.float64)] * 2
  twin = np.array(
    [
      [
        codecs.low_rank(layer, start, power_iterations)
        for layer, start in zip(each, starts, strict=True)
      ]
      for each in matrices
    ]
  )
  close(mean["blocks/w"][0], twin.mean(axis=0), 1e-5)
  # What is sent together adds up to that; alone it is a replica's own.
  close(own["blocks/w"].mean(axis=0), twin.mean(axis=0), 1e-5)
  if name == "local_low_rank":
    close(own["blocks/w"], twin, 1e-5)
  close(mean["embed"][0], mean_of(values)["embed"], EXACT)  # No matrix.


@pytest.mark.parametrize(
  ("fraction", "counts"), [(0.25, (6, 30)), (0.5, (12, 60))]
)
def test_a_mask_sends_its_share_of_the_values_as_they_are(fraction, counts):
  codec, values = written("random_mask", fraction=fraction), draw()
  ((mean, own),) = sent_in_turn(settings(exchange={"codec": codec}), values)
  for name, whole in named(mean_of(values)).items():
    is_sent = own[name][0] != 0
    # A share of 23 values, and of the 120 of either layer.
    layers = is_sent.reshape(2, -1) if name == "blocks/w" else is_sent[None]
    count = counts[name == "blocks/w"]
    assert layers.sum(axis=1).tolist() == [count] * len(layers)
    close(mean[name][0], np.where(is_sent, whole, 0), EXACT)


def test_stochastic_rounding_errs_by_a_step_at_most_and_not_on_average():
  exchange = sent("int(scale=tensor,rounding=stochastic)")
  values, times = draw(), 200
  seen = list(sent_in_turn(settings(exchange=exchange), values, times))
  whole = named(values)["embed"]
  found = np.stack([own["embed"] for _, own in seen])
  # 7 steps from 0 to the largest value; the scale is rounded upwards.
  step = np.abs(whole).max(axis=1, keepdims=True) / 7 * (1 + 2**-6)
  error = found - whole
  assert np.all(np.abs(error) <= step)
  # To the nearest it would be half a step at most.
  assert np.any(np.abs(error) > 0.6 * step)
  # The mean of 200 draws of variance step^2 / 4 at most: 6 deviations.
  assert np.all(np.abs(error.mean(axis=0)) < 6 * step / 2 / np.sqrt(times))


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
    exchange_of.cache_clear()  # Built anew, and alike.
    ((mean, own),) = sent_in_turn(config, values)
    found.append({**mean, **{f"own/{n}": leaf for n, leaf in own.items()}})
  first, again, other = found
  for name in first:
    np.testing.assert_array_equal(again[name], first[name])
    if codec == "low_rank(rank=2)" and name.endswith("embed"):
      continue  # Sent as it is.
    assert np.mean(other[name] != first[name]) > 0.05, name


@pytest.mark.parametrize(
  # Of three blocks of 40 values 8 each are kept: 8 x 6 bits, or 40.
  ("indices", "num_bytes"),
  [("packed", 6), ("bitmap", 5)],
)
def test_indices_travel_as_asked_for(indices, num_bytes):
  config = settings(exchange=sent(TOP_K(indices=indices)))
  update, state = exchange_of(config)
  program = str(jax.make_jaxpr(update)(draw(), state))
  # [replicas, layers, blocks, bytes]
  others = {"packed": 5, "bitmap": 6}[indices]
  assert f"u8[3,2,3,{num_bytes}]" in program
  assert f"u8[3,2,3,{others}]" not in program
  ((mean, own),) = sent_in_turn(config, draw())
  twin_mean, _ = means_of(config, draw())
  close(replica(mean), twin_mean, EXACT)
