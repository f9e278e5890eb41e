"""Chooses smaller models of the same shape, when the user's takes too long.

A smaller model has its width, its number of layers and its number of heads
divided by one number. Its runs have as many tokens for each parameter as the
planned run: the batch and the number of steps both shrink as the root of the
number of parameters.
"""

import math

from dilocox_jax.checks import flat
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.plan.model.shapes import (
  ModelShape,
  flops_per_token,
  parameter_count,
)
from experiments.gaps.tuned_pairs import global_batch

# Numbers by which a model is divided.
_DIVISORS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_FEWEST_STEPS = 40
# A best rate falls about as this power of the number of parameters: -0.33 for
# AdamW (recalled), -0.45 for Muon from 26 thousand to 10 million parameters
# (`experiments.gaps.tuning`).
_RATE_POWER = -0.4
# Three rates with B sequences in a step and three with B / 2.
_RUNS_OF_A_PAIR = 3 * 1.5
NUM_SIZES = 3  # Sizes that are trained, if there are as many.


def pair_flops(config: RunConfig) -> float:
  """Returns the operations of three rates with both batches (FLOP).

  Args:
    config: Config of AllReduce with B sequences in a step.
  """
  length = config.data.sequence_length
  tokens = global_batch(config) * length * config.total_steps
  return _RUNS_OF_A_PAIR * tokens * flops_per_token(config.model.shape, length)


def smaller_configs(config: RunConfig, most_flops: float) -> list[RunConfig]:
  """Returns runs of smaller models, the smallest first.

  They are the largest models whose pairs of runs stay within a number of
  operations, at most `NUM_SIZES` of them.

  Args:
    config: Config of AllReduce with the planned model.
    most_flops: Most operations of all pairs together (FLOP).

  Returns:
    The configs. There may be fewer than two, if the model is small already.
  """
  found: dict[int, RunConfig] = {}
  left = most_flops
  for divisor in _DIVISORS:
    candidate = _smaller(config, divisor)
    if candidate is None or len(found) == NUM_SIZES:
      break
    size = parameter_count(candidate.model.shape)
    # The others, each a quarter as large at most, take less than this one.
    if size not in found and pair_flops(candidate) <= left / 2:
      found[size] = candidate
      left -= pair_flops(candidate)
  return [found[size] for size in sorted(found)]


def _smaller(config: RunConfig, divisor: int) -> RunConfig | None:
  """Returns a run of a smaller model; None if no smaller one is possible.

  Args:
    config: Config of AllReduce with the planned model.
    divisor: Number by which the model is divided.
  """
  shape = config.model.shape
  if type(shape) is not ModelShape or config.lora.rank:
    return None
  sizes = _sizes(shape, divisor)
  if sizes is None:
    return None
  values = flat(config.to_mapping())
  values |= {f"model.{name}": size for name, size in sizes.items()}
  try:
    smaller = from_mapping(values)
  except ValueError:
    return None
  parameters = parameter_count(shape)
  ratio = parameter_count(smaller.model.shape) / parameters
  batch = max(2 * round(global_batch(config) * math.sqrt(ratio) / 2), 2)
  tokens = config.total_steps * global_batch(config) * ratio
  steps = max(round(tokens / batch), _FEWEST_STEPS)
  warmup = round(config.inner.warmup_steps * steps / config.total_steps)
  rate = config.inner.learning_rate * ratio**_RATE_POWER
  values |= {
    "total_steps": steps,
    "data.batch_size": batch,
    "mesh.num_replicas": 1,
    "mesh.layout": "stacked",
    "mesh.num_stages": 1,
    "mesh.num_data_shards": 1,
    "mesh.num_tensor_shards": 1,
    "inner.accumulate_steps": 1,
    "inner.warmup_steps": min(warmup, steps - 1),
    "inner.learning_rate": float(f"{rate:.3g}"),
    "checkpoint.interval_steps": None,
    "checkpoint.init_from": "",
    "sync.steps_per_dispatch": None,
  }
  try:
    return from_mapping(values)
  except ValueError:
    return None


def _sizes(shape: ModelShape, divisor: int) -> dict[str, int] | None:
  """Returns the sizes of a model that is divided by a number.

  Args:
    shape: The model.
    divisor: The number.

  Returns:
    Fields of the section `model`; None if the model is too small.
  """
  heads = max(shape.num_heads // divisor, 1)
  # An even width of every head, as rotary positions need it.
  width = 2 * heads * round(shape.model_dim / divisor / (2 * heads))
  if width < 8:
    return None
  kv_heads = max(shape.kv_heads // divisor, 1)
  while heads % kv_heads:
    kv_heads -= 1
  return {
    "num_layers": max(round(shape.num_layers / divisor), 1),
    "model_dim": width,
    "num_heads": heads,
    "num_kv_heads": kv_heads,
    "ff_dim": max(round(shape.ff_dim / divisor), 4),
  }
