"""The bench `codecs`: time of encoding beside that of moving the same bytes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dilocox_jax.codecs.base import Encoder
from dilocox_jax.codecs.compose import codec, encoder, run_without_exchange
from dilocox_jax.plan.wire.chain import Chain, Encoding
from dilocox_jax.plan.wire.leaf import Leaf
from dilocox_jax.plan.wire.payload import Int
from dilocox_jax.plan.wire.reduction import LowRank
from dilocox_jax.pytypes import Array, Tree
from experiments.tools.benchmarks.ratios import Ratio, TimedProgram

_VALUES = Leaf(16, (1024, 4096))  # 256 MiB of fp32.
_MATRICES = Leaf(4, (1024, 4096))
_RANK = 32


def _drawn(leaf: Leaf) -> Array:
  return jax.random.normal(jax.random.key(0), leaf.stacked_shape, jnp.float32)


def _coded(coder: Encoder, values: Array) -> TimedProgram:
  """Encodes, then decodes; two programs, as on two machines."""
  encode = jax.jit(lambda x: coder.encode(x, jax.random.key(0)))
  decode = jax.jit(coder.decode)
  return lambda: jax.block_until_ready(decode(encode(values)))


def _timed(function: Callable[[Array], Tree], values: Array) -> TimedProgram:
  program = jax.jit(function)
  return lambda: jax.block_until_ready(program(values))


def _factorised(values: Array) -> TimedProgram:
  built = codec(Chain((LowRank(_RANK), Int(4))), _MATRICES)
  state = built.init(jax.random.key(0))

  def encode(values: Array):
    _, _, sent = run_without_exchange(built, values, state, jax.random.key(0))
    return sent

  return _timed(encode, values)


def _multiplied(values: Array) -> TimedProgram:
  """The two products that a low-rank encoding cannot do without."""
  shape = (_MATRICES.num_layers, _MATRICES.shape[1], _RANK)
  factor = jax.random.normal(jax.random.key(1), shape, jnp.float32)

  def products(values: Array):
    left = values @ factor
    return left, jnp.swapaxes(values, 1, 2) @ left

  return _timed(products, values)


def codec_ratios() -> list[Ratio]:
  """Returns what is compared. Bounds are goals, set beforehand."""
  int4 = encoder(Encoding((Int(4),)), _VALUES)
  values, matrices = _drawn(_VALUES), _drawn(_MATRICES)
  int4_name = "int4_encode_and_decode_over_copy"
  rank_name = "low_rank_encode_over_its_products"
  coded, copied = _coded(int4, values), _timed(jnp.copy, values)
  encoded, products = _factorised(matrices), _multiplied(matrices)
  return [
    Ratio(int4_name, coded, copied, bound=2.5),
    Ratio(rank_name, encoded, products, bound=1.5),
  ]
