"""The bench `codecs`: time of encoding beside that of moving the same bytes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dilocox_jax.codecs.base import (
  Encoder,
  Reduced,
)
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.pytypes import Array, Tree
from experiments.tools.benchmarks.ratios import Ratio, TimedProgram

_VALUES = 16, 1024, 4096  # 256 MiB of fp32.
_MATRICES = 4, 1024, 4096
_RANK = 32


def _drawn(shape: tuple[int, ...]) -> Array:
  return jax.random.normal(jax.random.key(0), shape, jnp.float32)


def _coded(encoder: Encoder, values: Array) -> TimedProgram:
  """Encodes, then decodes; two programs, as on two machines."""
  encode = jax.jit(lambda x: encoder.encode([x], jax.random.key(0)))
  decode = jax.jit(lambda arrays: encoder.decode(arrays, [values.shape]))
  return lambda: jax.block_until_ready(decode(encode(values)))


def _timed(function: Callable[[Array], Tree], values: Array) -> TimedProgram:
  program = jax.jit(function)
  return lambda: jax.block_until_ready(program(values))


def _factorised(values: Array) -> TimedProgram:
  codec, key = LowRank(_RANK, then=Int(4)), jax.random.key(0)
  state = codec.init([values.shape], key)

  def encode(values: Array) -> Tree:
    """Encodes the left factor, decodes it, and encodes the right one."""
    run = codec.run([values], state, key)
    left = next(run)
    sent = codec.then.encode(left, key)
    decoded = codec.then.decode(sent, [leaf.shape for leaf in left])
    right = run.send(Reduced(decoded, decoded))
    return sent, codec.then.encode(right, key)

  return _timed(encode, values)


def _multiplied(values: Array) -> TimedProgram:
  """The two products that a low-rank encoding cannot do without."""
  shape = (_MATRICES[0], _MATRICES[2], _RANK)
  factor = jax.random.normal(jax.random.key(1), shape, jnp.float32)

  def products(values: Array):
    left = values @ factor
    return left, jnp.swapaxes(values, 1, 2) @ left

  return _timed(products, values)


def codec_ratios() -> list[Ratio]:
  """Returns what is compared. Bounds are goals, set beforehand."""
  values, matrices = _drawn(_VALUES), _drawn(_MATRICES)
  int4_name = "int4_encode_and_decode_over_copy"
  rank_name = "low_rank_encode_over_its_products"
  coded, copied = _coded(Int(4), values), _timed(jnp.copy, values)
  encoded, products = _factorised(matrices), _multiplied(matrices)
  return [
    Ratio(int4_name, coded, copied, bound=2.5),
    Ratio(rank_name, encoded, products, bound=1.5),
  ]
