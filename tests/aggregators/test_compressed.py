import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.aggregators.collectives import collectives
from dilocox_jax.aggregators.compressed import CompressedMean
from dilocox_jax.codecs import low_rank
from dilocox_jax.codecs.low_rank import Factors, LowRank
from dilocox_jax.codecs.quantize import Float, Int
from dilocox_jax.codecs.sparse import RandomMask, TopK
from dilocox_jax.config.sections import ExchangeConfig
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.plan.model.division import Division
from dilocox_jax.plan.schedule.fragments import stacked_shape
from dilocox_jax.reference.exchanges import SharedFactors
from dilocox_jax.trees import leaves_by_path, without_pauses
from tests.aggregators.problem import (
  CODECS,
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
  replica,
)
from tests.codecs.alone import alone
from tests.oracles import config as oracle

EXACT = 1e-6  # fp32, values near 1


def tolerance_of(name, collective):
  """How far two orders of the same sums may lead apart."""
  if (name, collective) == ("float16", "all_reduce"):
    return 2**-10  # The network rounds every sum.
  return EXACT


MASK = RandomMask(0.25)


def compressed(codec, collective="auto", seed=0):
  return CompressedMean(codec, collective, seed, "replica", False)


def with_own(
  codec, values, *, rounds=1, collective="auto", layout="stacked", seed=0
):
  """(mean, own, state) of exchanges in a row, leaves [M, ...]."""
  exchange = compressed(codec, collective, seed)
  replicas = Replicas(NUM_REPLICAS, layout)
  state = every_replicas(exchange.init(replica(values)))
  update = jax.jit(replicas.map(without_pauses(exchange.update), (0, 0, 0), 0))
  participates = jnp.ones(NUM_REPLICAS, bool)
  for _ in range(rounds):
    args = (replicas.place(x, 0) for x in (values, participates, state))
    mean, own, state = update(*args)
    yield mean, own, state


@pytest.mark.parametrize(("name", "collective"), WAYS)
def test_replicas_agree_bit_by_bit_and_a_mesh_equals_a_stack(name, collective):
  codec, values = CODECS[name], draw()
  stacked = exchanged(values, codec, collective)
  mesh = exchanged(values, codec, collective, layout="mesh")
  # Warm factors are compared by what they span, below.
  one, other = ((mean, state.residual) for mean, state in (mesh, stacked))
  close(one, other, tolerance_of(name, collective))
  for mean, state in (stacked, mesh):
    assert_all_have_the_same((mean, state.codec))


@pytest.mark.parametrize(("name", "collective"), WAYS)
def test_the_order_of_the_replicas_does_not_matter(name, collective):
  values = draw()
  turned = jax.tree.map(lambda leaf: leaf[np.asarray([2, 0, 1])], values)
  mean, _ = exchanged(values, CODECS[name], collective)
  again, _ = exchanged(turned, CODECS[name], collective)
  close(again, mean, tolerance_of(name, collective))


@pytest.mark.parametrize(
  "name", ["float16", "int4", "e3m0", "local rank 2, int8", "top, int2"]
)
def test_what_is_gathered_is_the_mean_of_what_each_would_send_alone(name):
  codec, values = CODECS[name], draw()
  mean, _ = exchanged(values, codec, "all_gather")

  @jax.jit
  def received(own):
    leaves = leaves_by_path(own)
    stacked = [
      leaf.reshape(stacked_shape(path, leaf.shape))
      for path, leaf in leaves.items()
    ]
    return dict(zip(leaves, alone(codec, stacked)[0], strict=True))

  each = [received(replica(values, m)) for m in range(NUM_REPLICAS)]
  for path, leaf in named(replica(mean)).items():
    total = np.sum([np.asarray(own[path], np.float64) for own in each], axis=0)
    close(leaf, total.reshape(leaf.shape) / NUM_REPLICAS, EXACT)


@pytest.mark.parametrize(
  ("name", "collective"),
  [("float32", "all_reduce"), ("float32", "reduce_scatter")],
)
def test_without_loss_the_mean_is_the_mean(name, collective):
  values = draw()
  mean, _ = exchanged(values, CODECS[name], collective)
  close(replica(mean), mean_of(values), EXACT)


def test_factors_made_together_find_the_mean_of_different_matrices():
  # No two replicas share a direction: only the mean is of rank 2.
  rng = np.random.default_rng(3)
  thin = rng.normal(size=(2, 12, 2)) @ rng.normal(size=(2, 2, 10))
  noise = rng.normal(size=(NUM_REPLICAS, 2, 12, 10))
  matrices = thin + noise - noise.mean(axis=0)
  values = {**draw(), "blocks": {"w": jnp.asarray(matrices, jnp.float32)}}
  mean, own, _ = next(with_own(LowRank(2), values))
  close(mean["blocks"]["w"][0], matrices.mean(axis=0), 1e-5)
  # What each replica had in it adds up to it.
  close(own["blocks"]["w"].mean(axis=0), mean["blocks"]["w"][0], EXACT)


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_factors_of_few_bits_are_those_of_the_numpy_twin(collective):
  codec, values = CODECS["rank 2, int4"], draw()
  mean, own, _ = next(with_own(codec, values, collective=collective))
  twin = oracle.lossy_mean(
    ExchangeConfig("int(bits=4)", collective, 0.0), NUM_REPLICAS
  )
  state = compressed(codec, collective).init(replica(values))
  start = np.asarray(state.leaves["blocks/w"].right, np.float64)
  matrices = named(values)["blocks/w"]
  shared = SharedFactors(2, twin, {"blocks/w": start})
  expected, sent = shared.average([{"blocks/w": each} for each in matrices])
  close(replica(mean)["blocks"]["w"], expected["blocks/w"], EXACT)
  for m, each in enumerate(sent):
    close(replica(own, m)["blocks"]["w"], each["blocks/w"], EXACT)


@pytest.mark.parametrize("layout", ["stacked", "mesh"])
def test_warm_factors_are_one_for_all_and_come_from_the_mean(layout):
  codec, values = LowRank(2, then=Int(8)), draw(1)
  states = [
    state for *_, state in with_own(codec, values, rounds=2, layout=layout)
  ]
  for number, state in enumerate(states, start=1):
    assert_all_have_the_same(state)
    np.testing.assert_array_equal(state.count, number)
  first, second = (state.leaves["blocks/w"].right[0] for state in states)
  assert first.shape == (2, 10, 2)
  # Power iteration on the same mean turns the factor to its main directions.
  mean = mean_of(values)["blocks"]["w"]
  for layer in range(2):
    _, _, main = np.linalg.svd(mean[layer])
    main = main[:2].T

    def off(factor, main=main):
      basis, _ = np.linalg.qr(np.asarray(factor, np.float64))
      return np.linalg.norm(basis - main @ (main.T @ basis))

    assert off(second[layer]) < off(first[layer])


@pytest.mark.parametrize("layout", ["stacked", "mesh"])
def test_a_mask_is_one_for_all_replicas_and_another_the_next_time(layout):
  values = draw(2)
  chosen = []
  for mean, own, _ in with_own(MASK, values, rounds=2, layout=layout):
    is_sent = jax.tree.map(lambda leaf: np.asarray(leaf) != 0, own)
    assert_all_have_the_same(is_sent)
    exact = jax.tree.map(np.multiply, mean_of(values), replica(is_sent))
    close(replica(mean), exact, EXACT)
    chosen.append(named(is_sent))
  for path, first in chosen[0].items():
    second = chosen[1][path]
    assert first.sum() == second.sum()
    assert (first != second).any(), path


def test_masks_depend_on_the_seed_and_on_the_leaf():
  values = {"a": draw()["embed"], "b": draw()["embed"]}
  sent = [next(with_own(MASK, values, seed=seed))[1] for seed in (0, 1)]
  masks = [own[leaf][0] != 0 for own in sent for leaf in "ab"]
  for number, one in enumerate(masks):
    for other in masks[:number]:
      assert (one != other).any()


def test_replicas_round_by_chances_of_their_own():
  own = every_replicas(replica(draw()))
  codec = Int(4, rounding="stochastic")
  (mean, first, _), (_, second, _) = with_own(
    codec, own, rounds=2, collective="all_gather"
  )
  for path, sent in named(first).items():
    whole = named(own)[path]
    step = 2 * np.abs(whole).max() / 7
    assert np.abs(sent - whole).max() < step
    for m in range(1, NUM_REPLICAS):
      assert (sent[0] != sent[m]).any(), path
    assert (sent[0] != named(second)[path][0]).any(), path
    # Errors that are independent shrink in the mean.
    error = np.square(named(mean)[path][0] - whole[0]).mean()
    assert error < 0.7 * np.square(sent - whole).mean()


def test_replicas_that_take_no_part_are_as_if_they_were_not_there():
  exchange = compressed(Int(8), "all_gather")
  values = draw(4)
  state = every_replicas(exchange.init(replica(values)))
  update = jax.jit(
    Replicas(NUM_REPLICAS).map(without_pauses(exchange.update), (0, 0, 0), 0)
  )
  participates = jnp.asarray([True, False, True])
  mean, own, _ = update(values, participates, state)
  for path, leaf in named(own).items():
    assert not leaf[1].any()
    close(named(mean)[path][0], (leaf[0] + leaf[2]) / 2, EXACT)
  nobody, own, _ = update(values, jnp.zeros(NUM_REPLICAS, bool), state)
  for leaf in jax.tree.leaves((nobody, own)):
    assert not leaf.any()


def test_results_are_like_the_values_whatever_was_sent():
  values = {"a": jnp.ones((NUM_REPLICAS, 3, 2, 2))}
  for codec in (Float("float16"), LowRank(1), Int(8, "tensor")):
    mean, own, _ = next(with_own(codec, values))
    for tree in (mean, own):
      assert tree["a"].shape == values["a"].shape
      assert tree["a"].dtype == jnp.float32
      close(tree, values, 1e-2)


def test_leaves_are_found_by_their_path():
  one, two, three = jnp.arange(3)
  found = leaves_by_path({"b": {"w": one, "a": two}, "a": three})
  assert found == {"a": three, "b/a": two, "b/w": one}


FACTORS = {
  "kernel": Factors(1.0 + jnp.arange(6 * 4 * 2.0).reshape(6, 4, 2)),
  "table": Factors(jnp.ones((1, 4, 2))),
}


def _observed(monkeypatch, num_matrices, follows_rank=False):
  """Products of six layers and a table at rank 2, with room for so many."""
  monkeypatch.setattr(low_rank, "MAX_OBSERVED_BYTES", num_matrices * 2 * 2 * 4)
  return low_rank.grams(FACTORS, 2, follows_rank)


def _product(path):
  right = FACTORS[path].right
  return jnp.swapaxes(right, 1, 2) @ right


def test_products_of_small_factors_reach_the_host_as_they_are(monkeypatch):
  found = _observed(monkeypatch, 12)
  assert set(found) == set(FACTORS)
  for path, gram in found.items():
    np.testing.assert_allclose(gram, _product(path), rtol=1e-6)


def test_of_large_factors_some_layers_stand_for_all(monkeypatch):
  found = _observed(monkeypatch, 5)
  some = 3 * _product("kernel")[np.array([0, 3])]
  np.testing.assert_allclose(found["kernel"], some, rtol=1e-6)
  np.testing.assert_allclose(found["table"], _product("table"), rtol=1e-6)


def test_the_largest_are_left_out_unless_the_rank_follows_them(monkeypatch):
  assert _observed(monkeypatch, 1) == {}
  needed = _observed(monkeypatch, 1, follows_rank=True)
  assert {path: len(gram) for path, gram in needed.items()} == {
    "kernel": 1,
    "table": 1,
  }


@pytest.mark.parametrize("num_layers", [2, 3])
def test_a_divided_replica_finds_the_mean_of_a_whole_one(num_layers):
  """Two stages divide two layers evenly, and multiply three one by one."""
  rng = np.random.default_rng(4)
  shape = (2, num_layers, 8, 12)
  values = {"blocks": {"up": {"kernel": jnp.asarray(rng.normal(size=shape))}}}
  values = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), values)
  aggregator = aggregator_of(LowRank(2))
  axes = aggregator.axes
  found = []
  for replicas in (Replicas(2), Replicas(2, "mesh", Division(2, 2))):
    state = aggregator.init(jax.tree.map(lambda leaf: leaf[0], values))

    def one(values, state, replicas=replicas):
      mean, state = aggregator.update(values, state)
      return replicas.divided(mean), replicas.divided(state)

    program = jax.jit(replicas.map(one, (0, axes), (None, axes)))
    placed = replicas.place_state(values, 0), replicas.place_state(state, axes)
    found.append(program(*placed))
  for whole, divided in zip(*map(jax.tree.leaves, found), strict=True):
    np.testing.assert_allclose(whole, divided, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("codec", [Int(4), LowRank(2), TopK(0.5)])
def test_a_leaf_without_values_costs_nothing_and_stays(codec):
  exchange = aggregator_of(codec, Feedback(residual_dtype="int8"))

  def mean(values):
    return exchange.update(values, exchange.init(values))[0]

  values = {"a": jnp.ones((2, 3)), "b": jnp.zeros((2, 0, 5))}
  of_all = jax.vmap(mean, axis_name="replica", out_axes=None)
  assert jax.eval_shape(of_all, values)["b"].shape == (0, 5)
  alone = {"a": (3,)}
  both = collectives(codec, alone | {"b": (0, 5)}, 3)
  assert both == collectives(codec, alone, 3)
