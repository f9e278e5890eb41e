"""Programs that the benches `round` and `codecs` compare.

`round`: overhead of delay and of stacking. `codecs`: time of
encoding beside that of moving the same bytes. Bounds are goals, set beforehand.
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
from dilocox_jax.training import build
from dilocox_jax.trees import Array, Pausing, Tree
from experiments.tools import bench_inner as inner
from experiments.tools.timing import Ratio, TimedProgram

VALUES = 16, 1024, 4096  # 256 MiB of fp32.
_RANK = 32
# Times of encoding and decoding over those of a copy, at most. Set beforehand.
BOUNDS = {
  "int(bits=4)": 1.5,
  "int(bits=1)": 1.5,
  "top_k(fraction=0.1)+int(bits=2)": 3.0,
}


def _drawn(shape: tuple[int, ...]) -> Array:
  return jax.random.normal(jax.random.key(0), shape, jnp.float32)


def _coded(encoder: Encoder, values: Array) -> TimedProgram:
  """Encodes, then decodes; two programs, as on two machines."""
  encode = jax.jit(lambda x: encoder.encode([x]))
  decode = jax.jit(lambda arrays: encoder.decode(arrays, [values.shape]))
  return lambda: jax.block_until_ready(decode(encode(values)))


def _timed(function: Callable[[Array], Tree], values: Array) -> TimedProgram:
  program = jax.jit(function)
  return lambda: jax.block_until_ready(program(values))


def _factorised(values: Array) -> TimedProgram:
  """Encodes the left factor, decodes it, and encodes the right one."""
  codec, key = LowRank(_RANK, then=Int(4)), jax.random.key(0)
  state = codec.init([values.shape], key)

  def encode(values: Array) -> Tree:
    sent = []

    def reduce(leaves: list[Array]) -> Pausing:
      sent.append(codec.then.encode(leaves))
      decoded = codec.then.decode(sent[-1], [leaf.shape for leaf in leaves])
      return Reduced(decoded, decoded)
      yield  # It pauses nowhere.

    list(codec.run([values], state, key, reduce))
    return sent  # The compiler leaves out what only decodes.

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
      _coded(named_codec(name).encoder, values),
      copied,
      bound,
    )
    for name, bound in BOUNDS.items()
  ]
  matrices = _drawn((max(shape[0] // 4, 1), *shape[1:]))
  encoded, products = _factorised(matrices), _multiplied(matrices)
  name = "low rank in 4 bits: encode over its products"
  return [*coded, Ratio(name, encoded, products, bound=1.1)]


# What the rounds train, and no codec, since only the delay is timed.
ROUNDS = {
  "model.preset": "tiny",
  "sync.method": "dilocox",
  "sync.sync_interval": 50,
  "exchange.codec": "float32",
  "exchange.feedback": 0.0,
  "adaptive.mode": "off",
}


def _delayed_round(config: RunConfig) -> TimedProgram:
  """A round with an exchange pending; each call goes on from the last one."""
  programs = build.programs(config)
  params = jax.jit(programs.model.init)(jax.random.key(0))
  interval = config.sync.named.schedule.sync_interval
  batches = inner.drawn_batches(programs, config, interval)
  optimizer = jax.jit(programs.steps.optimizer.init)(params)
  state = programs.rounds.init(params, optimizer)

  def run() -> None:
    nonlocal state
    # The program reuses the memory of the state that it is given.
    state, metrics, _ = programs.rounds.run(state, batches)
    jax.block_until_ready((state, metrics))

  run()  # Nothing is pending in the first one.
  return run


def _inner_steps(config: RunConfig) -> TimedProgram:
  """The same inner steps of the same stacked model, and nothing else."""
  return inner.timed_steps(config, config.sync.named.schedule.sync_interval)[0]


def round_ratios(changes: Mapping[str, Any] = ROUNDS) -> list[Ratio]:
  """Returns what is compared. Bounds are goals, set beforehand.

  Args:
    changes: Fields of a config, by dotted names, in place of `ROUNDS`.
  """
  two, one = (
    from_mapping({**ROUNDS, **changes, "mesh.num_replicas": count})
    for count in (2, 1)
  )
  delayed = "delayed round over its inner steps"
  stacked = "2 stacked replicas over one, for the same tokens"
  return [
    Ratio(delayed, _delayed_round(two), _inner_steps(two), bound=1.02),
    Ratio(stacked, _inner_steps(two), _inner_steps(one), bound=1.05, scale=2),
  ]
