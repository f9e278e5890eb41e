"""Whether a device computes what the reference page and the CPU compute.

A figure is an error: the largest difference, over the largest value of what is
expected. Products on a GPU are rounded to TF32 unless a program asks for more,
so what holds on a CPU has to be seen on the device.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dilocox_jax as dx
from dilocox_jax.models.fused_attention import named_attention
from dilocox_jax.optimizers import named_optimizer
from dilocox_jax.plan.schedule import methods
from dilocox_jax.reference import methods as page
from dilocox_jax.reference import optimizers
from dilocox_jax.trees import Array, Tree

# (what, error, bound)
Error = tuple[str, float, float]

_REPLICAS, _ROUNDS, _RATE, _ROWS = 2, 3, 0.05, 24
_METHODS = {
  "diloco": methods.diloco(4),
  "streaming_diloco": methods.streaming_diloco(6, 3, 1, 0.5, "sliced"),
  "eager": methods.eager(4),
  "dilocox": methods.dilocox(4, "reset"),
  "overlap_loco": methods.delayed(4, 4, 1, "continue", fragment_order="sliced"),
}
# Codecs, and bounds of their errors; products of low rank are rounded.
_CODECS = {
  **dict.fromkeys(("int(bits=4)", "int(bits=1)", "e3m0", "float16"), 1e-6),
  "top_k(fraction=0.1)": 1e-6,
  "low_rank(rank=8)+int(bits=8)": 2e-2,
  "low_rank(rank=8)": 1e-5,
}


def errors(attention: str, length: int) -> Iterator[Error]:
  """Yields what is compared, one error after the other.

  Args:
    attention: Name of the fused attention of this device.
    length: Tokens of a sequence for attention, a multiple of 128.
  """
  for name in _METHODS:
    yield f"{name} over the reference page", _method_error(name), 1e-6
  for codec, bound in _CODECS.items():
    yield f"{codec} over the CPU's", _codec_error(codec), bound
  yield "a step of Muon over the CPU's", _muon_error(), 2e-2
  yield (
    f"{attention} attention over plain",
    _attention_error(attention, length),
    2e-2,
  )


def _error(found: Tree, expected: Tree) -> float:
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  worst = 0.0
  for x, y in pairs:
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    worst = max(worst, float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30)))
  return worst


def _over_cpu(function: Callable[..., Tree], *arguments: Tree) -> float:
  """Returns the error of a function here, beside that on the CPU."""
  there = jax.device_put(arguments, jax.devices("cpu")[0])
  return _error(jax.jit(function)(*arguments), jax.jit(function)(*there))


def _drawn(*shape: int, seed: int = 0) -> Array:
  return jnp.asarray(
    np.random.default_rng(seed).normal(size=shape), jnp.float32
  )


def _method_error(name: str) -> float:
  """Trains towards random targets; the gradient w - target has no product."""
  method = _METHODS[name]
  interval = method.schedule.sync_interval
  targets = np.asarray(_drawn(_REPLICAS, _ROUNDS * interval, _ROWS, 8))
  inner, first = optax.sgd(_RATE), jnp.zeros((_ROWS, 8))

  def step(w, state, target):
    updates, state = inner.update(w - target, state)
    return optax.apply_updates(w, updates), state, (0.0, 0.0)

  outer = optax.sgd(0.7, 0.6, nesterov=True)
  rounds = dx.make_rounds(method, step, outer, num_replicas=_REPLICAS)
  state = rounds.init(first, inner.init(first))
  for start in range(0, targets.shape[1], interval):
    batches = jnp.asarray(targets[:, start : start + interval])
    state, _, _ = rounds.run(state, batches)
  return _error(
    rounds.flush(state)[0].replica.params, _on_page(method, targets)
  )


def _on_page(method: dx.Method, targets: np.ndarray) -> np.ndarray:
  """Returns the replicas' parameters as the reference page computes them.

  Args:
    method: The method; its fragments are slices of neighbouring rows.
    targets: Targets by replica and step [M, steps, rows, columns].
  """
  schedule = method.schedule
  names = [str(p) for p in range(schedule.num_fragments)]

  def cut(rows: np.ndarray) -> dict[str, np.ndarray]:
    return dict(
      zip(names, np.split(rows.astype(np.float64), len(names)), strict=True)
    )

  found = page.train(
    lambda w, target: (0.0, {name: w[name] - target[name] for name in names}),
    cut(np.zeros(targets.shape[2:])),
    [[cut(target) for target in own] for own in targets],
    inner=optimizers.Sgd(_RATE),
    outer=optimizers.Sgd(0.7, 0.6, nesterov=True),
    sync_interval=schedule.sync_interval,
    overlap_steps=schedule.overlap_steps,
    rule=method.rule,
    mixing_alpha=method.mixing_alpha,
    fragments=[[name] for name in names],
  )
  return np.stack([np.concatenate([w[n] for n in names]) for w in found.params])


def _codec_error(name: str) -> float:
  """The mean of two replicas through a codec, beside the CPU's."""
  aggregator = dx.exchange(name, collective="all_gather")
  values = {"w": _drawn(_REPLICAS, 64, 256)}
  outer = jax.tree.map(lambda leaf: jnp.zeros_like(leaf[0]), values)
  state = aggregator.init(outer)

  def mean(values: Tree) -> Tree:
    def average(own: Tree) -> Tree:
      return aggregator.average(own, state, outer)[0]

    return jax.vmap(average, axis_name="replica")(values)

  return _over_cpu(mean, values)


def _muon_error() -> float:
  params = {"w": _drawn(64, 256)}
  muon = named_optimizer("muon", 0.02)
  state = muon.init(params)
  return _over_cpu(lambda g: muon.update(g, state, params)[0], params)


def _attention_error(name: str, length: int) -> float:
  """Both on this device, in bfloat16, which the kernels ask for."""
  heads = [
    _drawn(2, length, 4, 64, seed=n).astype(jnp.bfloat16) for n in range(3)
  ]
  fused, plain = named_attention(name), named_attention("plain")
  return _error(jax.jit(fused)(*heads), jax.jit(plain)(*heads))
