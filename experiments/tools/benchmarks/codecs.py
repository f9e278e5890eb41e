"""The bench `codecs`: time of encoding beside that of moving the same bytes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dilocox_jax.codecs.base import Encoder, Reduced, encoder_of
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.named import named_codec
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.trees import Array, Tree
from experiments.tools.benchmarks.ratios import Ratio, TimedProgram

VALUES = 16, 1024, 4096  # 256 MiB of fp32.
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
  shape = (values.shape[0], values.shape[2], _RANK)
  factor = jax.random.normal(jax.random.key(1), shape, jnp.float32)

  def products(values: Array):
    left = jnp.matmul(values, factor, precision="highest")
    right = jnp.swapaxes(values, 1, 2)
    return left, jnp.matmul(right, left, precision="highest")

  return _timed(products, values)


# Times of encoding and decoding over those of a copy, at most. Set beforehand.
BOUNDS = {
  "int(bits=4)": 1.5,
  "int(bits=1)": 1.5,
  "top_k(fraction=0.1)+int(bits=2)": 3.0,
}


def codec_ratios(shape: tuple[int, ...] = VALUES) -> list[Ratio]:
  """Returns what is compared. Bounds are goals, set beforehand.

  Args:
    shape: Shape of the values, [layers, rows, columns].
  """
  values = _drawn(shape)
  copied = _timed(jnp.copy, values)
  coded = [
    Ratio(
      f"{name}: encode and decode over a copy",
      _coded(encoder_of(named_codec(name)), values),
      copied,
      bound,
    )
    for name, bound in BOUNDS.items()
  ]
  matrices = _drawn((max(shape[0] // 4, 1), *shape[1:]))
  encoded, products = _factorised(matrices), _multiplied(matrices)
  name = "low rank in 4 bits: encode over its products"
  return [*coded, Ratio(name, encoded, products, bound=1.1)]
