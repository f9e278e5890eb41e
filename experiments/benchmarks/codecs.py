"""The bench `codecs`: what encoding costs beside the memory it must pass."""

import functools

import jax
import jax.numpy as jnp

from dilocox_jax.codecs.base import Encoder
from dilocox_jax.codecs.compose import codec, encoder, run_without_exchange
from dilocox_jax.plan.wire.chain import Chain, Encoding
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import Int
from dilocox_jax.plan.wire.reduction import LowRank
from dilocox_jax.pytypes import Array
from experiments.benchmarks.ratios import Ratio, Timed

_VALUES = Leaf(16, (1024, 4096))  # 256 MiB of fp32.
_MATRICES = Leaf(4, (1024, 4096))
_RANK = 32


def _drawn(leaf: Leaf) -> Array:
  return jax.random.normal(jax.random.key(0), leaf.stacked_shape, jnp.float32)


def _coded(coder: Encoder, values: Array) -> Timed:
  """Encodes, then decodes; two programs, as on two machines."""
  encode = jax.jit(lambda x: coder.encode(x, jax.random.key(0)))
  decode = jax.jit(coder.decode)
  return lambda: jax.block_until_ready(decode(encode(values)))


def _copied(values: Array) -> Timed:
  copy = jax.jit(jnp.copy)
  return lambda: jax.block_until_ready(copy(values))


def _factorised(values: Array) -> Timed:
  built = codec(Chain((LowRank(_RANK), Int(4))), _MATRICES)
  state = built.init(jax.random.key(0))

  @jax.jit
  def encode(values: Array):
    _, _, sent = run_without_exchange(built, values, state, jax.random.key(0))
    return sent

  return lambda: jax.block_until_ready(encode(values))


def _multiplied(values: Array) -> Timed:
  """The two products that a low-rank encoding cannot do without."""
  shape = (_MATRICES.num_layers, _MATRICES.shape[1], _RANK)
  factor = jax.random.normal(jax.random.key(1), shape, jnp.float32)

  @jax.jit
  def products(values: Array):
    left = values @ factor
    return left, jnp.swapaxes(values, 1, 2) @ left

  return lambda: jax.block_until_ready(products(values))


def ratios() -> list[Ratio]:
  """What is compared; bounds are goals, set beforehand."""
  int4 = encoder(Encoding((Int(4),)), _VALUES)
  values = functools.cache(lambda: _drawn(_VALUES))
  matrices = _drawn(_MATRICES)
  return [
    Ratio(
      "int4_encode_and_decode_over_copy",
      _coded(int4, values()),
      _copied(values()),
      bound=2.5,
    ),
    Ratio(
      "low_rank_encode_over_its_products",
      _factorised(matrices),
      _multiplied(matrices),
      bound=1.5,
    ),
  ]
