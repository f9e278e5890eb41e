import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.aggregators.feedback import exchange
from dilocox_jax.aggregators.mean import mean_of_finite_replicas
from dilocox_jax.codecs.quantize import Float, Int
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.plan.choices import LAYOUTS
from dilocox_jax.reference import exchanges as oracle
from tests.aggregators.problem import (
  CODECS,
  NO_FEEDBACK,
  NUM_REPLICAS,
  WAYS,
  Feedback,
  aggregator_of,
  assert_all_have_the_same,
  close,
  draw,
  every_replicas,
  exchanged,
  mean_of,
  named,
  program,
  replica,
)
from tests.codecs.alone import alone

EXACT = 1e-6  # fp32, values near 1
INT4 = CODECS["int4"]
# Lossy, whether the mean is rounded again on its way or not.
LOSSY = [
  (name, collective)
  for name, collective in WAYS
  if collective in ("all_gather", "reduce_scatter") and name != "float32"
]
VECTORS = 4, NUM_REPLICAS, 23  # exchanges, replicas, values


@functools.cache
def received(codec):
  """What is received of one vector, the real codec in float64 clothes."""

  @jax.jit
  def sent(values):
    return alone(codec, [values[None]])[0][0][0]

  return lambda values: np.asarray(
    sent(jnp.asarray(values, jnp.float32)), np.float64
  )


@functools.cache
def vector_program(codec, feedback, layout="stacked", collective="all_gather"):
  aggregator = aggregator_of(codec, feedback, collective=collective)
  replicas = Replicas(NUM_REPLICAS, layout)
  first = every_replicas(aggregator.init(jnp.zeros(VECTORS[-1:])))
  update = jax.jit(replicas.map(aggregator.update, (0, 0), (0, 0)))
  return replicas.place(first, 0), lambda values, state: update(
    replicas.place(jnp.asarray(values, jnp.float32), 0), state
  )


def rounds_of(seed=0):
  return np.random.default_rng(seed).normal(size=VECTORS).astype(np.float32)


def in_a_row(
  rounds, codec, feedback, layout="stacked", collective="all_gather"
):
  """Yields (mean [M, N], residual as it is kept) of every exchange."""
  state, update = vector_program(codec, feedback, layout, collective)
  for values in rounds:
    mean, state = update(values, state)
    yield np.asarray(mean), state.residual


def assert_as_the_twin(rounds, actual, twin):
  """Compares means and residuals of exchanges in a row with the numpy twin."""
  for values, (mean, residual) in zip(rounds, actual, strict=True):
    values = values.astype(np.float64)
    expected, _ = twin.average([{"x": own} for own in values])
    for own in mean:
      close(own, expected["x"], EXACT)
    close(residual, np.stack([owed["x"] for owed in twin.residuals]), EXACT)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
  ("decay", "against"), [(1.0, "own"), (0.9, "own"), (0.9, "mean")]
)
def test_feedback_is_that_of_the_numpy_twin(decay, against, layout):
  rounds = rounds_of()
  rounds[1, 2, 5] = np.nan  # One replica diverges for one exchange.
  rounds[2, 0, 7] = np.inf
  lossy = oracle.Lossy(lambda _, values: received(INT4)(values))
  twin = oracle.ErrorFeedback(lossy, decay, against)
  actual = in_a_row(rounds, INT4, Feedback(decay, against), layout)
  assert_as_the_twin(rounds, actual, twin)


@pytest.mark.parametrize(("name", "collective"), LOSSY)
def test_what_arrived_and_what_is_kept_is_what_was_wanted(name, collective):
  values = draw(1)
  run, state = program(CODECS[name], collective, Feedback())
  for _ in range(2):
    owed = mean_of(state.residual)
    mean, state = run(values, state)
    wanted = jax.tree.map(np.add, mean_of(values), owed)
    kept = mean_of(state.residual)
    assert all(leaf.any() for leaf in named(kept).values())
    close(jax.tree.map(np.add, replica(mean), kept), wanted, 3e-6)


@functools.cache
def received_slices(codec):
  """What is received of slices of a reduce-scatter that have one row each."""
  sent = jax.jit(lambda x: alone(codec, [x])[0][0])
  return lambda slices: np.asarray(
    sent(jnp.asarray(slices, jnp.float32)), np.float64
  )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", [1, 4])
def test_feedback_on_both_roundings_is_that_of_the_numpy_twin(bits, layout):
  # Blocks of 8, so that 23 values are three rows of 8.
  codec, rounds = Int(bits, block_size=8), rounds_of()
  rounds[1, 2, 5] = np.nan
  scattered = oracle.Scattered(
    lambda _, slices: received_slices(codec)(slices),
    lambda *_: 8,
    lambda _, slices: received_slices(codec.of_means)(slices),
  )
  twin = oracle.ErrorFeedback(scattered, 0.9)
  actual = in_a_row(rounds, codec, Feedback(0.9), layout, "reduce_scatter")
  assert_as_the_twin(rounds, actual, twin)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_nothing_is_lost_over_many_exchanges(collective):
  # The sum of all means plus the mean of what is owed is all that was wanted.
  rounds = rounds_of(2)
  seen = list(in_a_row(rounds, INT4, Feedback(), collective=collective))
  total = sum(mean[0].astype(np.float64) for mean, _ in seen)
  owed = np.asarray(seen[-1][1], np.float64).mean(axis=0)
  close(total + owed, rounds.astype(np.float64).mean(axis=1).sum(axis=0), 5e-6)
  assert np.abs(owed).max() > 0.01


def test_without_feedback_every_exchange_is_a_first_one():
  values = draw(3)
  run, first = program(INT4, "all_gather", NO_FEEDBACK)
  mean, state = run(values, first)
  again, state = run(values, state)
  assert state.residual is None
  close(again, mean, 0)


@pytest.mark.parametrize(
  ("dtype", "bytes_a_value", "bound"),
  # 8 significant bits; half a step of max / 127, and its scale's 8 bits.
  [("bfloat16", 2.0, 2**-8), ("int8", 25 / 23, 0.5 / 127 + 2**-8)],
)
def test_a_residual_may_be_kept_in_less_memory(dtype, bytes_a_value, bound):
  rounds = rounds_of(4)
  whole = next(in_a_row(rounds, INT4, Feedback()))[1]
  whole = np.asarray(whole, np.float64)
  narrow = in_a_row(rounds, INT4, Feedback(residual_dtype=dtype))
  (_, kept), (mean, _) = next(narrow), next(narrow)
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(kept))
  assert size == bytes_a_value * whole.size
  if dtype == "bfloat16":
    restored = np.asarray(kept, np.float64)
  else:
    codes, scales = (np.asarray(x, np.float64) for x in kept)
    restored = ((codes - 128) * scales).reshape(whole.shape)
  assert np.abs(restored - whole).max() <= bound * np.abs(whole).max()
  assert np.abs(restored - whole).max() > 0
  # The next exchange sends what was kept, not what was lost.
  wanted = rounds[1] + restored
  sent = [received(INT4)(own) for own in wanted]
  close(mean[0], np.mean(sent, axis=0), EXACT)


def test_small_values_of_a_narrow_type_are_sent_in_the_end():
  # The residual of the small one grows by 0.001 up to 1, which a bfloat16
  # cannot: 0.5 + 0.001 is 0.5 there.
  small = exchange(Int(1, "tensor"), feedback=1.0)
  values = jnp.broadcast_to(jnp.array([1, 0.001], jnp.bfloat16), (2, 2))

  def one(state, own):
    mean, state = small.update({"w": own}, state)
    return state, mean["w"]

  def body(state, _):
    return jax.vmap(one, axis_name="replica")(state, values)

  first = jax.vmap(lambda own: small.init({"w": own}))(values)
  _, means = jax.lax.scan(body, first, length=4000)
  assert means.dtype == jnp.bfloat16
  arrived = means[:, 0].astype(jnp.float32).mean(axis=0)
  np.testing.assert_allclose(arrived, [1, 0.001], atol=3e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_replica_that_is_not_finite_neither_spreads_nor_owes(bad, dtype):
  rounds = rounds_of(5)
  rounds[1, 1, 3] = bad
  feedback = Feedback(residual_dtype=dtype)
  seen = list(in_a_row(rounds[:3], INT4, feedback))
  others = list(in_a_row(rounds[:1], INT4, feedback))
  close(seen[0][0], others[0][0], 0)
  for mean, residual in seen:
    assert np.isfinite(mean).all()
    for leaf in jax.tree.leaves(residual):
      assert np.isfinite(np.asarray(leaf, np.float32)).all()
  after = seen[1][1]
  codes = np.asarray(after[0] if dtype == "int8" else after, np.float32)
  nothing = 128 if dtype == "int8" else 0
  assert (codes[1] == nothing).all()
  assert (codes[0] != nothing).any() and (codes[2] != nothing).any()


def sent_of(values, state, codec):
  """What every replica sent, and the new states, leaves [M, ...]."""
  aggregator = aggregator_of(codec, Feedback(), collective="all_gather")
  over = Replicas(NUM_REPLICAS).map(aggregator.average, (0, 0), 0)
  _, sent, state = jax.jit(over)(values, state)
  return sent, state


def test_a_replica_that_is_not_finite_shows_in_what_was_sent():
  values = jnp.asarray(rounds_of(8)[0]).at[1, 3].set(jnp.nan)
  state, _ = vector_program(INT4, Feedback())
  sent, _ = sent_of(values, state, INT4)
  for m in (0, 2):
    close(sent[m], received(INT4)(values[m]), EXACT)
  assert not np.isfinite(sent[1]).all()


def test_a_replica_left_out_for_its_residual_shows_in_what_was_sent():
  """As below: 3e38 twice is no fp32, though either value is."""
  values = np.full(VECTORS[1:], 1.0, np.float32)
  values[0, 4] = 3e38
  codec = Float("float16")
  state, _ = vector_program(codec, Feedback())
  for is_left_out in (False, True):
    sent, state = sent_of(values, state, codec)
    finite = [bool(np.isfinite(own).all()) for own in sent]
    assert finite == [not is_left_out, True, True]


def test_a_residual_that_grows_out_of_range_is_dropped():
  # fp16 ends at 65504: each time nearly all of the value is left over.
  values = np.full(VECTORS[1:], 1.0, np.float32)
  values[0, 4] = 3e38
  rounds = [values, values, np.full_like(values, 0.5)]
  (_, kept), (mean, dropped), (last, after) = in_a_row(
    rounds, Float("float16"), Feedback()
  )
  assert kept[0, 4] > 2e38
  # 6e38 is no fp32: the replica has no part in this exchange.
  close(mean, np.ones_like(mean), EXACT)
  assert not np.asarray(dropped[0]).any()
  close(last, np.full_like(last, 0.5), EXACT)
  assert not np.asarray(after).any()


def test_without_a_finite_replica_the_mean_is_zero():
  rounds = np.full((1, *VECTORS[1:]), np.nan, np.float32)
  [(mean, residual)] = in_a_row(rounds, INT4, Feedback())
  assert not mean.any() and not np.asarray(residual).any()


def test_lossless_feedback_is_the_plain_mean():
  values = draw(6)
  mean, state = exchanged(values, Float(), feedback=Feedback())
  close(replica(mean), mean_of(values), EXACT)
  plain = mean_of_finite_replicas()
  over = Replicas(NUM_REPLICAS).map(lambda x: plain.update(x, ()), (0,), None)
  close(replica(mean), jax.jit(over)(values)[0], 0)
  assert not any(leaf.any() for leaf in named(state.residual).values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_second_exchange_needs_no_compilation(layout):
  run, state = program(
    CODECS["mask, top, int4"], "all_gather", Feedback(), layout=layout
  )
  for seed in range(3):
    _, state = run(draw(seed), state)
    assert_all_have_the_same(state.codec)
    assert run._cache_size() == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_codecs_are_shared_and_residuals_are_each_replicas_own(dtype):
  aggregator = aggregator_of(
    CODECS["rank 2, int4"], Feedback(residual_dtype=dtype)
  )
  values = draw(7)
  state = aggregator.init(replica(values))
  state = state._replace(residual=every_replicas(state.residual))
  # Mapping refuses to share what differs between replicas.
  update = Replicas(NUM_REPLICAS).map(
    aggregator.update, (0, aggregator.axes), (None, aggregator.axes)
  )
  mean, new = jax.eval_shape(update, values, state)
  assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)
  assert jax.tree.map(jnp.shape, mean) == jax.tree.map(
    jnp.shape, replica(values)
  )


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"against": "theirs"}, "against='theirs' must be one of own, mean"),
    ({"residual_dtype": "int4"}, "residual_dtype='int4' must be one of float"),
    ({"feedback": 1.5}, "feedback=1.5 must be at least 0 and at most 1"),
    ({"feedback": -0.5}, "feedback=-0.5 must be at least 0 and at most 1"),
    ({"feedback": 1.0, "keep_unsent": True}, "both make up for what a codec"),
    ({"collective": "all_reduce"}, "'all_reduce' would add up codes: take"),
    ({"codec": 4}, "codec=4 must be a codec, or names such as 'top_k"),
  ],
)
def test_an_exchange_that_cannot_be_says_why(settings, message):
  with pytest.raises(ValueError) as caught:
    exchange(**{"codec": "int", **settings})
  assert message in str(caught.value)
  assert "\n" not in str(caught.value)


def test_eight_bits_a_value_are_what_the_residual_of_a_large_leaf_costs():
  aggregator = aggregator_of(Int(4), Feedback(residual_dtype="int8"))
  state = jax.eval_shape(
    aggregator.init, {"blocks": {"w": jnp.zeros((2, 64, 128))}}
  )
  size = sum(
    leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.residual)
  )
  assert size == 2 * 64 * 128 * (1 + 2 / 128)
