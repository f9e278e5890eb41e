"""Compares a device's results with numpy, with the CPU or with plain attention.

Methods are compared with plain numpy (`reference.methods`), codecs and Muon
with the same program on the CPU, and fused attention with plain attention on
the device. An error is the largest difference divided by the largest expected
value. The check matters because GPUs round the factors of matrix products to
TF32 unless a program asks for more.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dilocox_jax as dx
from dilocox_jax.models.fused_attention import named_attention
from dilocox_jax.optimizers import named_optimizer
from dilocox_jax.plan.schedule import methods
from dilocox_jax.reference import methods as numpy_methods
from dilocox_jax.reference import optimizers
from dilocox_jax.trees import Array, Tree


class Error(NamedTuple):
  """The error of one comparison, and the largest error that is allowed.

  Attributes:
    name: Name of the comparison.
    error: Largest difference divided by the largest expected value.
    bound: Largest allowed error.
  """

  name: str
  error: float
  bound: float


# The runs by which methods are compared.
_REPLICAS = 2
_ROUNDS = 3
_RATE = 0.05  # Inner learning rate.
_ROWS = 24  # Rows of the parameters. The fragments of every method divide them.
_METHODS = {
  "diloco": methods.diloco(4),
  "streaming_diloco": methods.streaming_diloco(
    sync_interval=6,
    num_fragments=3,
    overlap_steps=1,
    mixing_alpha=0.5,
    fragment_order="sliced",
  ),
  "eager": methods.eager(4),
  "dilocox": methods.dilocox(4, "reset"),
  "overlap_loco": methods.delayed(4, 4, 1, "continue", fragment_order="sliced"),
}
# Largest allowed error of each codec. It is larger for low rank, whose matrix
# products are rounded.
_CODECS = {
  **dict.fromkeys(("int(bits=4)", "int(bits=1)", "e3m0", "float16"), 1e-6),
  "top_k(fraction=0.1)": 1e-6,
  "low_rank(rank=8)+int(bits=8)": 2e-2,
  "low_rank(rank=8)": 1e-5,
}


def errors(attention: str, length: int) -> Iterator[Error]:
  """Compares methods, codecs, Muon and attention, and yields the errors.

  Args:
    attention: Name of the fused attention of this device.
    length: Tokens of a sequence for attention, a multiple of 128.
  """
  for name in _METHODS:
    yield Error(f"{name} over the reference page", _method_error(name), 1e-6)
  for codec, bound in _CODECS.items():
    yield Error(f"{codec} over the CPU's", _codec_error(codec), bound)
  yield Error("a step of Muon over the CPU's", _muon_error(), 2e-2)
  yield Error(
    f"{attention} attention over plain",
    _attention_error(attention, length),
    2e-2,
  )


def _error(result: Tree, expected: Tree) -> float:
  """Returns the largest error of a leaf of `result` (`_leaf_error`)."""
  errors = jax.tree.leaves(jax.tree.map(_leaf_error, result, expected))
  return max(errors)


def _leaf_error(result: Array, expected: Array) -> float:
  """Returns the largest difference divided by the largest expected value."""
  expected_values = np.asarray(expected, np.float64)
  difference = np.asarray(result, np.float64) - expected_values
  scale = max(np.abs(expected_values).max(), 1e-30)
  return float(np.abs(difference).max() / scale)


def _over_cpu(function: Callable[[Tree], Tree], argument: Tree) -> float:
  """Returns the error of a function on the device against that on the CPU."""
  program = jax.jit(function)
  cpu_argument = jax.device_put(argument, jax.devices("cpu")[0])
  return _error(program(argument), program(cpu_argument))


def _drawn(*shape: int, seed: int = 0) -> Array:
  """Draws a float32 array from N(0, 1)."""
  return jnp.asarray(
    np.random.default_rng(seed).normal(size=shape), jnp.float32
  )


def _method_error(name: str) -> float:
  """Returns the error of a method's training on the device against numpy's.

  The replicas train toward random targets. Their parameters are compared after
  the last exchange, which may end after the last step.
  """
  method = _METHODS[name]
  interval = method.schedule.sync_interval
  targets = np.asarray(_drawn(_REPLICAS, _ROUNDS * interval, _ROWS, 8))
  inner = optax.sgd(_RATE)
  first = jnp.zeros((_ROWS, 8))

  def step(w, state, target):
    # The gradient, w - target, has no matrix product, so nothing is rounded to
    # TF32.
    updates, state = inner.update(w - target, state)
    # In place of the loss and the gradient norm, which are not read here.
    return optax.apply_updates(w, updates), state, (0.0, 0.0)

  outer = optax.sgd(0.7, 0.6, nesterov=True)
  rounds = dx.make_rounds(method, step, outer, num_replicas=_REPLICAS)
  state = rounds.init(first, inner.init(first))
  for start in range(0, targets.shape[1], interval):
    batches = jnp.asarray(targets[:, start : start + interval])
    state, _, _ = rounds.run(state, batches)
  flushed_state, *_ = rounds.flush(state)
  return _error(
    flushed_state.replica.params, _trained_in_numpy(method, targets)
  )


def _trained_in_numpy(method: dx.Method, targets: np.ndarray) -> np.ndarray:
  """Trains with a method in numpy (`reference.methods`).

  The targets are [M, steps, rows, columns]. Returns the parameters of the M
  replicas after all exchanges, [M, rows, columns].
  """
  schedule = method.schedule
  names = [str(p) for p in range(schedule.num_fragments)]

  # Divides an array into one block of rows for each fragment, by name.
  def cut(rows: np.ndarray) -> dict[str, np.ndarray]:
    return dict(
      zip(names, np.split(rows.astype(np.float64), len(names)), strict=True)
    )

  def loss_and_gradient(w, target):
    return 0.0, {name: w[name] - target[name] for name in names}

  result = numpy_methods.train(
    loss_and_gradient,
    cut(np.zeros(targets.shape[2:])),
    [[cut(target) for target in row] for row in targets],
    inner=optimizers.Sgd(_RATE),
    outer=optimizers.Sgd(0.7, 0.6, nesterov=True),
    sync_interval=schedule.sync_interval,
    overlap_steps=schedule.overlap_steps,
    rule=method.rule,
    mixing_alpha=method.mixing_alpha,
    fragments=[[name] for name in names],
  )
  return np.stack(
    [np.concatenate([w[n] for n in names]) for w in result.params]
  )


def _codec_error(name: str) -> float:
  """Returns the error, against the CPU, of the mean of two encoded messages."""
  aggregator = dx.exchange(name, collective="all_gather")
  values = {"w": _drawn(_REPLICAS, 64, 256)}
  outer = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), values)
  state = aggregator.init(outer)

  def mean(values: Tree) -> Tree:
    def average(update: Tree) -> Tree:
      return aggregator.average(update, state, outer)[0]

    return jax.vmap(average, axis_name="replica")(values)

  return _over_cpu(mean, values)


def _muon_error() -> float:
  """Returns the error of one update of Muon against the CPU's."""
  params = {"w": _drawn(64, 256)}
  muon = named_optimizer("muon", 0.02)
  state = muon.init(params)
  return _over_cpu(lambda g: muon.update(g, state, params)[0], params)


def _attention_error(name: str, length: int) -> float:
  """Returns the error of fused attention against plain attention.

  Both run on the device in bfloat16, which the fused kernels need.
  """
  query, key, value = (
    _drawn(2, length, 4, 64, seed=seed).astype(jnp.bfloat16)
    for seed in range(3)
  )
  fused = jax.jit(named_attention(name))
  plain = jax.jit(named_attention("plain"))
  return _error(fused(query, key, value), plain(query, key, value))
