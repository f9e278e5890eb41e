import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.codecs.base import Reduced, messages
from dilocox_jax.codecs.low_rank import LocalLowRank, LowRank
from dilocox_jax.codecs.quantize import Float, Int
from dilocox_jax.codecs.sparse import TopK
from tests.codecs.alone import KEY, alone, gaussian, through

SHAPE = 2, 9, 16
VALUES = jnp.asarray(gaussian(SHAPE), jnp.float32)


def test_the_quantiser_of_a_chain_sees_only_what_was_selected():
  found, _ = through(TopK(0.25, 1000, then=Int(1, "tensor")), VALUES)
  flat = np.abs(np.asarray(VALUES)).reshape(2, -1)
  for layer in range(2):
    kept = np.sort(flat[layer])[-36:]
    sizes = np.unique(np.abs(found[layer][found[layer] != 0]))
    assert np.count_nonzero(found[layer]) == 36
    assert sizes == pytest.approx([kept.mean()], rel=2.0**-8)


@pytest.mark.parametrize(
  ("codec", "shape"),
  [
    (LowRank(2, then=Int(4)), (3, 5)),
    (LowRank(2, then=Int(4)), (2, 3, 4)),
    (LocalLowRank(2, then=Int(4)), (1,)),
    (LocalLowRank(2, then=Int(4)), (2, 3, 4)),
  ],
)
def test_a_leaf_that_is_not_factorised_goes_to_the_next_link(codec, shape):
  values = jnp.asarray(gaussian(shape), jnp.float32)
  run = jax.jit(lambda values: alone(codec, [values]))
  [found], [state], [sent] = run(values)
  expected, arrays = through(Int(4), values)
  assert np.array_equal(found, expected)
  assert state == () and len(sent) == len(arrays)


def test_what_is_no_projection_ends_with_what_the_exchange_answered():
  run = messages(Int(4), [VALUES], [()], KEY)
  assert np.array_equal(next(run)[0], VALUES)
  answer = Reduced([VALUES + 1], [VALUES + 2])
  with pytest.raises(StopIteration) as stop:
    run.send(answer)
  assert stop.value.value == (answer, [()])


def test_alone_the_mean_is_ones_own_part():
  codec = LowRank(2, then=Float("bfloat16"))
  run = jax.jit(lambda values: alone(codec, [values]))
  [found], _, sent = run(VALUES)
  left, right = (arrays[0].astype(jnp.float32) for arrays in sent)
  left, right = left.reshape(2, 9, 2), right.reshape(2, 16, 2)
  # The left factor spans what is decoded, and the right one tells how much.
  q, _ = np.linalg.qr(np.asarray(left))
  found = np.asarray(found)
  rest = found - q @ (np.swapaxes(q, 1, 2) @ found)
  assert np.linalg.norm(rest) < 1e-5 * np.linalg.norm(found)
  assert np.linalg.norm(found) == pytest.approx(
    float(jnp.linalg.norm(right.reshape(-1))), rel=1e-5
  )


def test_stochastic_rounding_follows_from_the_key_alone():
  codec = LowRank(2, then=Int(8, rounding="stochastic"))
  run = jax.jit(lambda key: alone(codec, [VALUES], key=key)[0][0])
  first, same, other = run(KEY), run(KEY), run(jax.random.key(1))
  assert np.array_equal(first, same)
  assert not np.array_equal(first, other)
