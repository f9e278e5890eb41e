"""The pairs of programs that the benches `round` and `codecs` compare.

`round` measures the overhead of an exchange that is under way during the next
round, and the overhead of two replicas on one device. `codecs` compares
encoding and decoding with copying the same values, and low rank with its matrix
products. The bounds are goals that were set before the measurements.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from dilocox_jax.codecs.base import Encoder, Reduced
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.named import named_codec
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.coroutines import Coroutine
from dilocox_jax.training import build
from dilocox_jax.trees import Array, Tree
from experiments.tools import bench_inner as inner
from experiments.tools.timing import Ratio, TimedProgram

VALUES = (16, 1024, 4096)  # 256 MiB of fp32.
_RANK = 32  # Of the low-rank factors that are timed.
# Largest time of encoding and decoding over the time of a copy, by codec.
BOUNDS = {
  "int(bits=4)": 1.5,
  "int(bits=1)": 1.5,
  "top_k(fraction=0.1)+int(bits=2)": 3.0,
}


def _drawn(shape: tuple[int, ...]) -> Array:
  """Draws a float32 array from N(0, 1)."""
  return jax.random.normal(jax.random.key(0), shape, jnp.float32)


def _coded(encoder: Encoder, values: Array) -> TimedProgram:
  """Returns a program that encodes values and decodes the message."""
  # Two programs, because encoding and decoding run on two machines.
  encode = jax.jit(lambda x: encoder.encode([x]))
  decode = jax.jit(lambda arrays: encoder.decode(arrays, [values.shape]))
  return lambda: jax.block_until_ready(decode(encode(values)))


def _timed(function: Callable[[Array], Tree], values: Array) -> TimedProgram:
  """Compiles a function, and returns a program that runs it on the values."""
  program = jax.jit(function)
  return lambda: jax.block_until_ready(program(values))


def _factorized(values: Array) -> TimedProgram:
  """Returns a program that encodes matrices as low-rank factors in 4 bits.

  It computes and encodes the left factor, decodes it, and computes and encodes
  the right factor. The matrices are [layers, rows, columns].
  """
  codec = LowRank(_RANK, then=Int(4))
  key = jax.random.key(0)
  state = codec.init([values.shape], key)

  def encode(values: Array) -> Tree:
    messages = []

    # In place of an exchange: the mean is the replica's own message.
    def reduce(leaves: list[Array]) -> Coroutine:
      message = codec.then.encode(leaves)
      messages.append(message)
      decoded = codec.then.decode(message, [leaf.shape for leaf in leaves])
      return Reduced(decoded, decoded)
      yield  # Makes this a generator, which stops nowhere.

    # `list` runs the codec to its end. Its results are not used, so the
    # compiler leaves out the decoding of the right factor.
    list(codec.run([values], state, key, reduce))
    return messages

  return _timed(encode, values)


def _multiplied(values: Array) -> TimedProgram:
  """Returns a program that computes only low rank's two matrix products."""
  shape = (values.shape[0], values.shape[2], _RANK)
  factor = jax.random.normal(jax.random.key(1), shape, jnp.float32)

  def products(values: Array):
    left = jnp.matmul(values, factor, precision="highest")
    right = jnp.swapaxes(values, 1, 2)
    return left, jnp.matmul(right, left, precision="highest")

  return _timed(products, values)


def codec_ratios(shape: tuple[int, ...] = VALUES) -> list[Ratio]:
  """Returns the comparisons of the bench `codecs`, which are not yet timed.

  `shape` is the shape of the values, [layers, rows, columns]. Low rank, which
  is slower, gets a quarter of the layers.
  """
  values = _drawn(shape)
  copy = _timed(jnp.copy, values)
  ratios = [
    Ratio(
      name=f"{name}: encode and decode over a copy",
      measured=_coded(named_codec(name).encoder, values),
      baseline=copy,
      bound=bound,
    )
    for name, bound in BOUNDS.items()
  ]
  matrices = _drawn((max(shape[0] // 4, 1), *shape[1:]))
  ratios.append(
    Ratio(
      name="low rank in 4 bits: encode over its products",
      measured=_factorized(matrices),
      baseline=_multiplied(matrices),
      bound=1.1,
    )
  )
  return ratios


# Fields of the timed rounds. They send fp32, since only the delay is timed.
ROUNDS = {
  "model.preset": "tiny",
  "sync.method": "dilocox",
  "sync.sync_interval": 50,
  "exchange.codec": "float32",
  "exchange.feedback": 0.0,
  "adaptive.mode": "off",
}


def _delayed_round(config: RunConfig) -> TimedProgram:
  """Returns a program that runs the next round of a method at every call.

  During the round, the exchange of the round before is under way.
  """
  programs = build.programs(config)
  params = jax.jit(programs.model.init)(jax.random.key(0))
  interval = config.sync.named.schedule.sync_interval
  batches = inner.drawn_batches(programs, config, interval)
  optimizer = jax.jit(programs.steps.optimizer.init)(params)
  state = programs.rounds.init(params, optimizer)

  def run() -> None:
    nonlocal state
    # The program reuses the memory of its argument `state`.
    state, metrics, _ = programs.rounds.run(state, batches)
    jax.block_until_ready((state, metrics))

  run()  # During the first round no exchange is under way.
  return run


def _inner_steps(config: RunConfig) -> TimedProgram:
  """Returns a program that runs a round's inner steps without an exchange."""
  run, _ = inner.timed_steps(config, config.sync.named.schedule.sync_interval)
  return run


def round_ratios(changes: Mapping[str, Any] = ROUNDS) -> list[Ratio]:
  """Returns the comparisons of the bench `round`, which are not yet timed.

  `changes` are fields of a config, by dotted names, that replace or extend
  `ROUNDS`.
  """
  fields = {**ROUNDS, **changes}
  one_replica = from_mapping({**fields, "mesh.num_replicas": 1})
  two_replicas = from_mapping({**fields, "mesh.num_replicas": 2})
  return [
    Ratio(
      name="delayed round over its inner steps",
      measured=_delayed_round(two_replicas),
      baseline=_inner_steps(two_replicas),
      bound=1.02,
    ),
    Ratio(
      name="2 stacked replicas over one, for the same tokens",
      measured=_inner_steps(two_replicas),
      baseline=_inner_steps(one_replica),
      bound=1.05,
      scale=2,
    ),
  ]
