"""What replicas receive of each other, and what they keep of what was lost."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.aggregators.exchange import exchange
from dilocox_jax.aggregators.norm_filter import norm_filter
from dilocox_jax.aggregators.traffic import exchange_operations
from dilocox_jax.codecs import low_rank
from dilocox_jax.codecs.low_rank import Factors, LowRank
from dilocox_jax.codecs.quantize import Float, Int
from dilocox_jax.codecs.sparse import RandomMask, TopK
from dilocox_jax.config.sections import ExchangeConfig
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.plan.choices import LAYOUTS
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
from tests.tiers import slow

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
  ("top_k(fraction=0.2,block_size=64)", "all_gather"),
]
ON_DEVICES = [WAYS[0], *WAYS[3:5]]  # Every collective once.


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
    *((*way, "own", "stacked") for way in WAYS),
    *((*way, "own", "mesh") for way in ON_DEVICES),
    *slow(*((*way, "own", "mesh") for way in WAYS if way not in ON_DEVICES)),
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
    assert_all_have_the_same((mean, state.codec, state.count))
    close(named(replica(mean)), expected, EXACT)
    for m in range(NUM_REPLICAS):
      close(named(replica(state.residual, m)), twin.residuals[m], EXACT)
      leaves = jax.tree.leaves(each(sent)[m])
      (is_finite,) = {bool(np.isfinite(leaf).any()) for leaf in leaves}
      assert is_finite == ((seed, m) != (1, 2))
      if is_finite:
        close(each(sent)[m], own[m], EXACT)


@pytest.mark.parametrize(
  ("link", "collective", "layout"),
  [
    ("float32", "all_reduce", "mesh"),
    *slow(("int(bits=4)", "all_gather", "stacked")),
    ("int(bits=4)", "reduce_scatter", "stacked"),
  ],
)
def test_warm_factors_are_those_of_the_numpy_twin(link, collective, layout):
  run, state = program(
    f"low_rank(rank=2)+{link}", layout, collective=collective
  )
  sizes = state.codec["blocks/w"].right.shape[1:]
  start = np.random.default_rng(0).normal(size=sizes).astype(np.float32)
  first = every_replicas(Factors(jnp.asarray(start)))
  state = state._replace(codec=state.codec | {"blocks/w": first})
  factors = twin_of(link, collective)
  shared = SharedFactors(2, factors, {"blocks/w": start.astype(float)})
  for seed in range(2):
    values = draw(seed)
    mean, sent, state = run(values, state)
    assert_all_have_the_same((mean, state.codec, state.count))
    matrices = named(values)["blocks/w"]
    expected, own = shared.average([{"blocks/w": leaf} for leaf in matrices])
    close(replica(mean)["blocks"]["w"], expected["blocks/w"], 1e-5)
    for m in range(NUM_REPLICAS):
      close(replica(sent, m)["blocks"]["w"], own[m]["blocks/w"], 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mask_is_one_for_all_replicas_and_another_the_next_time(layout):
  leaf = draw(2)["embed"]
  values = {"a": leaf, "b": leaf}
  chosen = []
  made = exchange(RandomMask(0.25))
  replicas = Replicas(NUM_REPLICAS, layout)
  state = every_replicas(made.init(replica(values)))
  run = jax.jit(replicas.map(made.average, (0, 0), 0))
  for _ in range(2):
    mean, own, state = run(*replicas.place((values, state), 0))[:3]
    is_sent = jax.tree.map(lambda leaf: np.asarray(leaf) != 0, own)
    assert_all_have_the_same(is_sent)
    exact = jax.tree.map(np.multiply, mean_of(values), replica(is_sent))
    close(replica(mean), exact, EXACT)
    chosen += [tuple(is_sent[name][0].tolist()) for name in "ab"]
  # Another for every leaf and exchange.
  assert len(set(chosen)) == 4 and {sum(each) for each in chosen} == {6}


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


def exchanges(values, codec="float16"):
  """(mean, sent, residual) of one leaf in some exchanges with feedback."""
  made = exchange(codec, collective="all_gather", feedback=1.0)
  state = every_replicas(made.init(jnp.zeros(23)))
  run = jax.jit(Replicas(NUM_REPLICAS).map(made.average, (0, 0), 0))
  for each in values:
    mean, sent, state = run(each, state)[:3]
    yield mean, sent, state.residual


def test_a_residual_that_grows_out_of_range_is_dropped():
  # fp16 ends at 65504: each time nearly all of the value is left over.
  large = jnp.ones((NUM_REPLICAS, 23)).at[0, 4].set(3e38)
  run = exchanges([large, large, jnp.full_like(large, 0.5)])
  _, sent, kept = next(run)
  assert kept[0, 4] > 2e38 and np.isfinite(sent).all()
  # 6e38 is no fp32: the replica has no part in this exchange, and shows it.
  mean, sent, kept = next(run)
  close(mean, jnp.ones_like(mean), EXACT)
  assert [bool(np.isfinite(own).all()) for own in sent] == [False, True, True]
  assert not np.any(kept[0])
  mean, _, kept = next(run)
  close(mean, jnp.full_like(mean, 0.5), EXACT)
  assert not np.any(kept)


@pytest.mark.parametrize("codec", ["float32", INT4])
def test_without_a_finite_replica_the_mean_is_zero(codec):
  nothing = jnp.full((NUM_REPLICAS, 23), jnp.nan)
  [(mean, _, residual)] = exchanges([nothing], codec)
  assert not np.any(mean) and not np.any(residual)


def plain_mean(values, layout="stacked"):
  run = exchange().average
  over = Replicas(len(jax.tree.leaves(values)[0]), layout)
  mapped = over.map(lambda own: run(own, (), own)[0], (0,), None)
  return jax.jit(mapped)(values)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_is_summed_in_single_precision(layout):
  # bf16 has eight bits: 256 + 1 is 256 there, and the mean would be 85.5.
  narrow = np.asarray([256, 1, 1], jnp.bfloat16)
  # fp16 ends at 65504: the sum would be infinite.
  tall = np.asarray([60000, 60000, 60000], np.float16)
  mean = plain_mean({"narrow": narrow, "tall": tall}, layout)
  assert (mean["narrow"].dtype, mean["tall"].dtype) == (
    jnp.bfloat16,
    np.float16,
  )
  assert (float(mean["narrow"]), float(mean["tall"])) == (86, 60000)


FACTORS = {
  "kernel": Factors(1.0 + jnp.arange(6 * 4 * 2.0).reshape(6, 4, 2)),
  "table": Factors(jnp.ones((1, 4, 2))),
}


def test_of_large_factors_the_host_gets_the_products_of_some_layers(
  monkeypatch,
):
  def observed(num_matrices):
    room = num_matrices * 2 * 2 * 4
    monkeypatch.setattr(low_rank, "MAX_OBSERVED_BYTES", room)
    return low_rank.grams(FACTORS, 2)

  whole = {
    path: jnp.swapaxes(each.right, 1, 2) @ each.right
    for path, each in FACTORS.items()
  }
  close(observed(12), whole, EXACT)
  some = {**whole, "kernel": 3 * whole["kernel"][np.array([0, 3])]}
  close(observed(5), some, EXACT)
  assert {path: len(gram) for path, gram in observed(1).items()} == {
    "kernel": 1,
    "table": 1,
  }


BY_STAGE = Division(num_data_shards=2, num_stages=2)
BY_TENSOR = Division(num_data_shards=2, num_tensor_shards=2)


@pytest.mark.parametrize(
  ("codec", "num_layers", "division"),
  [
    (LowRank(2), 2, BY_STAGE),
    (LowRank(2), 3, BY_STAGE),
    (LowRank(2), 3, BY_TENSOR),
    (Int(4), 3, BY_STAGE),
    (Int(4), 3, BY_TENSOR),
    *slow((Float(), 3, BY_STAGE), (TopK(1.0), 3, BY_STAGE)),
    *slow((TopK(1.0), 3, BY_TENSOR)),
  ],
)
def test_a_divided_replica_finds_the_mean_of_a_whole_one(
  codec, num_layers, division
):
  """Two stages divide two layers evenly, and share the rows of three."""
  rng = np.random.default_rng(4)
  leaf = jnp.asarray(rng.normal(size=(2, num_layers, 8, 12)), jnp.float32)
  values = {"blocks": {"up": {"kernel": leaf}}}
  aggregator = exchange(codec)
  axes = aggregator.axes
  found = []
  text = ""
  for replicas in (Replicas(2), Replicas(2, "mesh", division)):

    def one(values, state, replicas=replicas):
      mean, state = aggregator.update(values, state)
      return replicas.divided(mean), replicas.divided(state)

    state = aggregator.init(replica(values))
    program = jax.jit(replicas.map(one, (0, axes), (None, axes)))
    placed = replicas.place_state(values, 0), replicas.place_state(state, axes)
    text = program.lower(*placed).compile().as_text() or ""
    found.append(jax.device_get(program(*placed)))
  close(found[0], found[1], 1e-4)
  # No device collects what it holds a part of, or numbers all values of a
  # factor: that was a buffer of 31 GB on chips, for 107 billion parameters.
  numbers = re.search(rf"u32\[{num_layers * 12 * 2}\]", text)
  assert not (numbers and isinstance(codec, LowRank))
  assert not re.search(rf"f32\[{num_layers},8,12\]\S* all-gather", text)


@pytest.mark.parametrize("codec", [Int(4), LowRank(2), TopK(0.5), Float()])
def test_results_are_like_the_values_and_empty_leaves_cost_nothing(codec):
  made = exchange(codec, feedback=1.0)
  values = {
    "a": jnp.ones((2, 3, 2, 2), jnp.bfloat16),
    "b": jnp.zeros((2, 0, 5)),
  }
  of_all = jax.vmap(
    lambda values: made.average(values, made.init(values), values)[:2],
    axis_name="replica",
  )
  # In bfloat16 a residual of 1 would not grow by 0.001.
  assert made.init(values).residual["a"].dtype == jnp.float32
  for tree in jax.eval_shape(of_all, values):
    assert jax.tree.map(lambda x: (x.shape, x.dtype), tree) == jax.tree.map(
      lambda x: (x.shape, x.dtype), values
    )
  alone = {"a": (3, 2, 2)}
  both = exchange_operations(codec, alone | {"b": (0, 5)}, 3)
  assert both == exchange_operations(codec, alone, 3)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"against": "theirs"}, "against='theirs' must be one of own, mean"),
    ({"feedback": 1.5}, "feedback=1.5 must be at least 0 and at most 1"),
    ({"codec": 4}, "codec=4 must be a codec, or names such as 'top_k"),
    ({"seed": "0"}, "seed='0' must be of type int"),
  ],
)
def test_an_exchange_that_cannot_be_says_why(settings, message):
  with pytest.raises(ValueError) as caught:
    exchange(**{"codec": "int", **settings})  # pyright: ignore
  assert message in str(caught.value)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("ratio", "must"),
  [
    (0, "max_norm_ratio=0 must be above 1 and below inf"),
    (-5.0, "max_norm_ratio=-5.0 must be above 1"),
    (1, "max_norm_ratio=1 must be above 1"),
    (float("nan"), "max_norm_ratio=nan must be above 1"),
    # A norm that is not finite would not be above this one.
    (float("inf"), "max_norm_ratio=inf must be above 1"),
    ("5", "max_norm_ratio='5' must be a number"),
    (None, "max_norm_ratio=None must be a number"),
  ],
)
def test_a_filter_needs_a_ratio_that_can_leave_out_too_large_norms(ratio, must):
  with pytest.raises(ValueError) as caught:
    norm_filter(exchange(), ratio)
  assert str(caught.value).startswith(must)
  assert "\n" not in str(caught.value)
