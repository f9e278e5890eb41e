import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.codecs.base import Reduced
from dilocox_jax.codecs.compose import codec, encoder, run_without_exchange
from dilocox_jax.plan.wire.chain import Chain, Encoding, leaf_messages
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import Dense, Int
from dilocox_jax.plan.wire.reduction import LowRank, RandomMask, TopK

LEAF = Leaf(2, (9, 16))
KEY = jax.random.key(0)
LOCAL = LowRank(2, factorisation="local")


def gaussian(leaf=LEAF):
  values = np.random.default_rng(0).normal(size=leaf.stacked_shape)
  return jnp.asarray(values, jnp.float32)


def compiled(built):
  return jax.jit(
    lambda values, key: run_without_exchange(
      built, values, built.init(KEY), key
    )
  )


@pytest.mark.parametrize(
  "payload",
  [
    Int(4),
    Chain((LowRank(2, 2), Int(4))),
    Chain((RandomMask(0.5), LowRank(2))),
    Chain((RandomMask(0.5), TopK(0.2, 32), Int(4))),
    Chain((LOCAL, Int(4))),
  ],
)
def test_a_codec_has_the_phases_of_its_payload(payload):
  assert codec(payload, LEAF).messages == leaf_messages(payload, LEAF)


def test_the_quantiser_of_a_chain_sees_only_what_was_selected():
  parts = TopK(0.25, 1000), Int(1, "tensor")
  coder = encoder(Encoding(parts), LEAF)
  values = gaussian()
  through = jax.jit(lambda values: coder.decode(coder.encode(values, KEY)))
  found = np.asarray(through(values))
  flat = np.abs(np.asarray(values)).reshape(2, -1)
  for layer in range(2):
    kept = np.sort(flat[layer])[-36:]
    sizes = np.unique(np.abs(found[layer][found[layer] != 0]))
    assert np.count_nonzero(found[layer]) == 36
    assert sizes == pytest.approx([kept.mean()], rel=2.0**-8)


@pytest.mark.parametrize(
  "low_rank, leaf",
  [
    (LowRank(2), Leaf(3, (5,))),
    (LowRank(2), Leaf(2, (3, 4))),
    (LOCAL, Leaf(1, ())),
    (LOCAL, Leaf(2, (3, 4))),
  ],
)
def test_a_leaf_that_is_not_factorised_goes_to_the_next_part(low_rank, leaf):
  values = gaussian(leaf)
  chained = codec(Chain((low_rank, Int(4))), leaf)
  plain = codec(Int(4), leaf)
  found = compiled(chained)(values, KEY)
  expected = compiled(plain)(values, KEY)
  assert np.array_equal(found[0], expected[0])
  assert found[1] == ()
  assert [len(arrays) for arrays in found[2]] == [2]


def test_a_quantiser_ends_with_what_the_exchange_answered():
  built = codec(Chain((Int(4),)), LEAF)
  run = built.run(gaussian(), (), KEY)
  assert np.array_equal(next(run), gaussian())
  answer = Reduced(gaussian() + 1, gaussian() + 2)
  with pytest.raises(StopIteration) as stop:
    run.send(answer)
  assert stop.value.value == (answer, ())


def test_alone_the_mean_is_ones_own_part():
  built = codec(Chain((LowRank(2), Dense("bfloat16"))), LEAF)
  found, _, sent = compiled(built)(gaussian(), KEY)
  left, right = (arrays[0].astype(jnp.float32) for arrays in sent)
  assert (left.shape, right.shape) == ((2, 9, 2), (2, 16, 2))
  # The left factor spans what is decoded, and the right one tells how much.
  q, _ = np.linalg.qr(np.asarray(left))
  found = np.asarray(found)
  rest = found - q @ (np.swapaxes(q, 1, 2) @ found)
  assert np.linalg.norm(rest) < 1e-5 * np.linalg.norm(found)
  assert np.linalg.norm(found) == pytest.approx(
    float(jnp.linalg.norm(right.reshape(-1))), rel=1e-5
  )


def test_stochastic_rounding_follows_from_the_key_alone():
  chain = Chain((LowRank(2), Int(8, rounding="stochastic")))
  built = codec(chain, LEAF)
  run = compiled(built)
  first, _, _ = run(gaussian(), KEY)
  same, _, _ = run(gaussian(), KEY)
  other, _, _ = run(gaussian(), jax.random.key(1))
  assert np.array_equal(first, same)
  assert not np.array_equal(first, other)
