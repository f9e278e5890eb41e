"""What replicas receive of each other, and what they keep of what was lost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.aggregators import kinds
from dilocox_jax.aggregators.collectives import collectives
from dilocox_jax.aggregators.feedback import exchange
from dilocox_jax.aggregators.kinds import EXCHANGES, ExchangeKind
from dilocox_jax.codecs import low_rank
from dilocox_jax.codecs.low_rank import Factors, LowRank
from dilocox_jax.codecs.quantize import Float, Int
from dilocox_jax.codecs.sparse import RandomMask, TopK
from dilocox_jax.config.sections import ExchangeConfig
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.plan.choices import LAYOUTS, loaded
from dilocox_jax.plan.model.division import Division
from dilocox_jax.reference.exchanges import ErrorFeedback, SharedFactors
from tests.aggregators.problem import (
  NUM_REPLICAS,
  assert_all_have_the_same,
  close,
  draw,
  every_replicas,
  mean_of,
  named,
  program,
  replica,
)
from tests.oracles import config as oracle

EXACT = 1e-6  # fp32, values near 1
INT4 = "int(block_size=32)"
# Every way in which what rounds to the nearest may travel.
WAYS = [
  ("float32", "all_reduce"),
  ("float32", "all_gather"),
  ("float32", "reduce_scatter"),
  (INT4, "all_gather"),
  (INT4, "reduce_scatter"),
  ("int(bits=1,block_size=8)", "reduce_scatter"),
  ("int(bits=8,scale=row)", "reduce_scatter"),
  ("e3m0(block_size=32)", "reduce_scatter"),
  ("top_k(fraction=0.2,block_size=64)+int(bits=2)", "all_gather"),
  ("local_low_rank(rank=2)+int(bits=8)", "all_gather"),
]


def twin_of(codec, collective, feedback=0.0, against="own"):
  """The numpy twin of an exchange of three replicas."""
  section = ExchangeConfig(codec, collective, feedback, against=against)
  return oracle.lossy_mean(section, NUM_REPLICAS)


def each(values):
  return [named(replica(values, m)) for m in range(len(values["embed"]))]


@pytest.mark.parametrize(
  ("codec", "collective", "against", "layout"),
  [
    (INT4, "all_gather", "mean", "stacked"),
    *((*way, "own", layout) for way in WAYS[:-2] for layout in LAYOUTS),
  ],
)
def test_exchanges_in_a_row_are_those_of_the_numpy_twin(
  codec, collective, against, layout
):
  """In the second one replica is not finite, and is left out of it."""
  settings = {"collective": collective, "feedback": 0.9, "against": against}
  run, state = program(codec, layout, **settings)
  twin = twin_of(codec, collective, 0.9, against)
  if not isinstance(twin, ErrorFeedback):
    twin = ErrorFeedback(twin, 0.9, against)
  for seed in range(3):
    values = draw(seed)
    if seed == 1:
      values["embed"] = values["embed"].at[2, 5].set(jnp.nan)
    mean, sent, state = run(values, state)
    expected, own = twin.average(each(values))
    assert_all_have_the_same((mean, state.codec))
    close(named(replica(mean)), expected, EXACT)
    for m in range(NUM_REPLICAS):
      close(named(replica(state.residual, m)), twin.residuals[m], EXACT)
      is_finite = np.isfinite(each(sent)[m]["embed"]).all()
      assert is_finite == ((seed, m) != (1, 2))
      if is_finite:
        close(each(sent)[m], own[m], EXACT)


@pytest.mark.parametrize(("codec", "collective"), WAYS[-2:])
def test_selected_values_are_those_that_each_would_send_alone(
  codec, collective
):
  values, kept = draw(), []
  for layout in LAYOUTS:
    run, state = program(codec, layout, collective=collective, feedback=1.0)
    mean, sent, state = run(values, state)
    assert_all_have_the_same((mean, state.codec))
    close(replica(mean), mean_of(sent), EXACT)
    # What arrived and what is kept is what was wanted.
    close(jax.tree.map(np.add, sent, state.residual), values, EXACT)
    alone, first = program(codec, num_replicas=1)
    own, _, _ = alone(jax.tree.map(lambda x: x[:1], values), first)
    close(replica(own), replica(sent), EXACT)
    kept.append(jax.device_get(mean))
  close(kept[0], kept[1], EXACT)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_factors_of_few_bits_are_those_of_the_numpy_twin(collective):
  codec, values = "low_rank(rank=2)+int(bits=4)", draw()
  run, state = program(codec, collective=collective)
  start = named(replica(state.codec.leaves["blocks/w"].right))[""]
  factors = twin_of("int(bits=4)", collective)
  shared = SharedFactors(2, factors, {"blocks/w": start})
  mean, sent, state = run(values, state)
  expected, own = shared.average(
    [{"blocks/w": leaf} for leaf in named(values)["blocks/w"]]
  )
  close(replica(mean)["blocks"]["w"], expected["blocks/w"], EXACT)
  for m in range(NUM_REPLICAS):
    close(replica(sent, m)["blocks"]["w"], own[m]["blocks/w"], EXACT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_warm_factors_are_one_for_all_and_find_the_mean(layout):
  # No two replicas share a direction: only the mean is of rank 2.
  rng = np.random.default_rng(3)
  thin = rng.normal(size=(2, 12, 2)) @ rng.normal(size=(2, 2, 10))
  noise = rng.normal(size=(NUM_REPLICAS, 2, 12, 10))
  matrices = thin + noise - noise.mean(axis=0)
  values = {**draw(), "blocks": {"w": jnp.asarray(matrices, jnp.float32)}}
  run, state = program("low_rank(rank=2)+bfloat16", layout, feedback=1.0)
  for number in (1, 2):
    mean, sent, state = run(values, state)
    assert_all_have_the_same((mean, state.codec))
    np.testing.assert_array_equal(state.codec.count, number)
  exact, first = program("low_rank(rank=2)", layout)
  mean, sent, _ = exact(values, first)
  close(mean["blocks"]["w"][0], matrices.mean(axis=0), 1e-5)
  # What each replica had in it adds up to it.
  close(mean_of(sent), replica(mean), EXACT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mask_is_one_for_all_replicas_and_another_the_next_time(layout):
  leaf = draw(2)["embed"]
  values, chosen = {"a": leaf, "b": leaf}, []
  for seed in (0, 1):
    made = exchange(RandomMask(0.25), seed=seed)
    replicas = Replicas(NUM_REPLICAS, layout)
    state = every_replicas(made.init(replica(values)))
    run = jax.jit(replicas.map(made.average, (0, 0), 0))
    for _ in range(2):
      mean, own, state = run(*replicas.place((values, state), 0))
      is_sent = jax.tree.map(lambda leaf: np.asarray(leaf) != 0, own)
      assert_all_have_the_same(is_sent)
      exact = jax.tree.map(np.multiply, mean_of(values), replica(is_sent))
      close(replica(mean), exact, EXACT)
      chosen += [tuple(is_sent[name][0].tolist()) for name in "ab"]
  # Another for every leaf, exchange and seed.
  assert len(set(chosen)) == len(chosen)
  assert {sum(each) for each in chosen} == {6}


def test_replicas_round_by_chances_of_their_own():
  values = every_replicas(replica(draw()))
  codec = Int(4, rounding="stochastic")
  run, state = program(codec, collective="all_gather")
  mean, first, state = run(values, state)
  _, second, _ = run(values, state)
  for path, sent in named(first).items():
    whole = named(values)[path]
    assert np.abs(sent - whole).max() < 2 * np.abs(whole).max() / 7
    assert len({own.tobytes() for own in sent}) == NUM_REPLICAS
    assert (sent[0] != named(second)[path][0]).any(), path
    # Errors that are independent shrink in the mean.
    error = np.square(named(mean)[path][0] - whole[0]).mean()
    assert error < 0.7 * np.square(sent - whole).mean()


@pytest.mark.parametrize("num_replicas", [1, 2, 5])
def test_any_number_of_replicas_may_exchange_slices(num_replicas):
  values = draw(5, num_replicas)
  run, state = program(
    "float32", num_replicas=num_replicas, collective="reduce_scatter"
  )
  mean, sent, state = run(values, state)
  close(replica(mean), mean_of(values), EXACT)
  close(sent, values, 0)
  assert state.residual is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_floats_are_added_in_the_type_they_are_sent_in(dtype):
  # Two sums and a mean, each rounded to the significant bits of the type.
  step = {"float16": 2**-11, "bfloat16": 2**-8}[dtype]
  values = draw(2)
  run, state = program(dtype, collective="all_reduce")
  mean, sent, _ = run(values, state)
  for path, own in named(sent).items():
    close(own, named(values)[path], step)
    error = np.abs(named(mean)[path] - own.mean(axis=0))
    assert (error <= 2 * step * np.abs(own).sum(axis=0) + EXACT).all()
    assert error.max() > 0


def kept_by(dtype, values, num_exchanges, **settings) -> Any:
  """(mean, sent, residual) of the last of some exchanges of one leaf."""
  made = exchange(
    **{"codec": INT4, "collective": "all_gather", "feedback": 1.0} | settings,
    residual_dtype=dtype,
  )
  state = every_replicas(made.init(jnp.zeros(23)))
  run = jax.jit(Replicas(NUM_REPLICAS).map(made.average, (0, 0), 0))
  mean: Any = None
  sent: Any = None
  for number in range(num_exchanges):
    mean, sent, state = run(values[number], state)
  return mean, sent, state.residual


VALUES = [draw(seed)["embed"] for seed in range(3)]


@pytest.mark.parametrize(
  ("dtype", "bytes_a_value", "bound"),
  # 8 significant bits; half a step of max / 127, and its scale's 8 bits.
  [("bfloat16", 2.0, 2**-8), ("int8", 25 / 23, 0.5 / 127 + 2**-8)],
)
def test_a_residual_may_be_kept_in_less_memory(dtype, bytes_a_value, bound):
  whole = np.asarray(kept_by("float32", VALUES, 1)[2], np.float64)
  kept = kept_by(dtype, VALUES, 1)[2]
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(kept))
  assert size == bytes_a_value * whole.size
  restored = np.asarray(kept, np.float64) if dtype == "bfloat16" else None
  if restored is None:
    codes, scales = (np.asarray(x, np.float64) for x in kept)
    restored = ((codes - 128) * scales).reshape(whole.shape)
  assert 0 < np.abs(restored - whole).max() <= bound * np.abs(whole).max()
  # The next exchange sends what was kept, not what was lost.
  mean, _, _ = kept_by(dtype, VALUES, 2)
  expected, _ = twin_of(INT4, "all_gather").average(
    [{"x": own} for own in np.asarray(VALUES[1], np.float64) + restored]
  )
  close(mean[0], expected["x"], EXACT)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_replica_that_is_not_finite_neither_spreads_nor_owes(bad, dtype):
  wrong = [VALUES[0], VALUES[1].at[1, 3].set(bad), VALUES[2]]
  mean, sent, residual = kept_by(dtype, wrong, 2)
  assert np.isfinite(mean).all()
  assert [bool(np.isfinite(own).all()) for own in sent] == [True, False, True]
  codes = np.asarray(residual[0] if dtype == "int8" else residual, np.float32)
  nothing = 128 if dtype == "int8" else 0
  assert [(own == nothing).all() for own in codes] == [False, True, False]
  mean, sent, _ = kept_by(dtype, wrong, 3)
  assert np.isfinite(mean).all() and np.isfinite(sent).all()


def test_a_residual_that_grows_out_of_range_is_dropped():
  # fp16 ends at 65504: each time nearly all of the value is left over.
  large = jnp.ones((NUM_REPLICAS, 23)).at[0, 4].set(3e38)
  values = [large, large, jnp.full_like(large, 0.5)]
  _, sent, kept = kept_by("float32", values, 1, codec="float16")
  assert kept[0, 4] > 2e38 and np.isfinite(sent).all()
  # 6e38 is no fp32: the replica has no part in this exchange, and shows it.
  mean, sent, kept = kept_by("float32", values, 2, codec="float16")
  close(mean, jnp.ones_like(mean), EXACT)
  assert [bool(np.isfinite(own).all()) for own in sent] == [False, True, True]
  assert not np.any(kept[0])
  mean, _, kept = kept_by("float32", values, 3, codec="float16")
  close(mean, jnp.full_like(mean, 0.5), EXACT)
  assert not np.any(kept)


@pytest.mark.parametrize("codec", ["float32", INT4])
def test_without_a_finite_replica_the_mean_is_zero(codec):
  nothing = [jnp.full((NUM_REPLICAS, 23), jnp.nan)]
  mean, _, residual = kept_by("float32", nothing, 1, codec=codec)
  assert not np.any(mean) and not np.any(residual)


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
def test_codecs_are_shared_and_residuals_are_each_replicas_own(dtype):
  made = exchange("low_rank(rank=2)+int", feedback=1.0, residual_dtype=dtype)
  values = draw(7)
  state = made.init(replica(values))
  state = state._replace(residual=every_replicas(state.residual))
  # Mapping refuses to share what differs between replicas.
  axes = made.axes
  update = Replicas(NUM_REPLICAS).map(made.update, (0, axes), (None, axes))
  found = jax.eval_shape(update, values, state)
  expected = replica(values), state
  assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)


FACTORS = {
  "kernel": Factors(1.0 + jnp.arange(6 * 4 * 2.0).reshape(6, 4, 2)),
  "table": Factors(jnp.ones((1, 4, 2))),
}


def test_of_large_factors_the_host_gets_the_products_of_some_layers(
  monkeypatch,
):
  def observed(num_matrices, follows_rank=False):
    room = num_matrices * 2 * 2 * 4
    monkeypatch.setattr(low_rank, "MAX_OBSERVED_BYTES", room)
    return low_rank.grams(FACTORS, 2, follows_rank)

  whole = {
    path: jnp.swapaxes(each.right, 1, 2) @ each.right
    for path, each in FACTORS.items()
  }
  close(observed(12), whole, EXACT)
  some = {**whole, "kernel": 3 * whole["kernel"][np.array([0, 3])]}
  close(observed(5), some, EXACT)
  assert observed(1) == {}
  needed = {path: len(gram) for path, gram in observed(1, True).items()}
  assert needed == {"kernel": 1, "table": 1}


@pytest.mark.parametrize("num_layers", [2, 3])
def test_a_divided_replica_finds_the_mean_of_a_whole_one(num_layers):
  """Two stages divide two layers evenly, and multiply three one by one."""
  rng = np.random.default_rng(4)
  leaf = jnp.asarray(rng.normal(size=(2, num_layers, 8, 12)), jnp.float32)
  values = {"blocks": {"up": {"kernel": leaf}}}
  aggregator = exchange(LowRank(2))
  axes, found = aggregator.axes, []
  for replicas in (Replicas(2), Replicas(2, "mesh", Division(2, 2))):

    def one(values, state, replicas=replicas):
      mean, state = aggregator.update(values, state)
      return replicas.divided(mean), replicas.divided(state)

    state = aggregator.init(replica(values))
    program = jax.jit(replicas.map(one, (0, axes), (None, axes)))
    placed = replicas.place_state(values, 0), replicas.place_state(state, axes)
    found.append(jax.device_get(program(*placed)))
  close(found[0], found[1], 1e-4)


@pytest.mark.parametrize("codec", [Int(4), LowRank(2), TopK(0.5), Float()])
def test_results_are_like_the_values_and_empty_leaves_cost_nothing(codec):
  made = exchange(codec, feedback=1.0, residual_dtype="int8")
  values = {
    "a": jnp.ones((2, 3, 2, 2), jnp.bfloat16),
    "b": jnp.zeros((2, 0, 5)),
  }
  of_all = jax.vmap(
    lambda values: made.average(values, made.init(values), values)[:2],
    axis_name="replica",
  )
  for tree in jax.eval_shape(of_all, values):
    assert jax.tree.map(lambda x: (x.shape, x.dtype), tree) == jax.tree.map(
      lambda x: (x.shape, x.dtype), values
    )
  alone = {"a": (3, 2, 2)}
  both = collectives(codec, alone | {"b": (0, 5)}, 3)
  assert both == collectives(codec, alone, 3)


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


@pytest.mark.parametrize(
  ("name", "kind", "message"),
  [
    ("mean", EXCHANGES["mean"], "'mean' is registered already"),
    ("new", ExchangeKind("none", exchange), "'new': collectives='none' must"),
    ("new", ExchangeKind(collectives, "here"), "'new': aggregator='here'"),
  ],
)
def test_a_kind_that_cannot_be_is_refused_in_one_line(name, kind, message):
  assert loaded(EXCHANGES["mean"].aggregator) is exchange
  with pytest.raises(ValueError, match=message):
    kinds.register_exchange(name, kind)
