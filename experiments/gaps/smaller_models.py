"""Chooses smaller models, for a user's model that takes too long to train.

A smaller model has about the same shape: width, number of layers and number of
heads are divided by about the same number. The batch and the number of steps
both shrink about as the root of the number of parameters, so the number of
tokens for each parameter stays about the same. A batch is not smaller than two
sequences, and a run is not shorter than 40 steps.
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
_FEWEST_STEPS = 40  # Least length of a run with a smaller model (assumed).
# A best rate falls about as this power of the number of parameters: -0.33 for
# AdamW (recalled), -0.45 for Muon from 26 thousand to 10 million parameters
# (`experiments.gaps.tuning`).
_RATE_POWER = -0.4
# Three rates with B sequences in a step and three with B / 2, which take half
# as long; counted in runs with B sequences.
_RUNS_OF_A_PAIR = 3 * 1.5
NUM_SIZES = 3  # Sizes that are trained, if there are as many.


def pair_flops(config: RunConfig) -> float:
  """Returns the operations of the runs that measure a model (FLOP).

  These are six runs of AllReduce: three learning rates with B sequences in a
  step, and three with B / 2.

  Args:
    config: Config of AllReduce with B sequences in a step.
  """
  length = config.data.sequence_length
  tokens = global_batch(config) * length * config.total_steps
  return _RUNS_OF_A_PAIR * tokens * flops_per_token(config.model.shape, length)


def smaller_configs(config: RunConfig, most_flops: float) -> list[RunConfig]:
  """Chooses up to three smaller models to train in place of a large one.

  Larger models are tried first. Each may take at most half of the operations
  that are left, so that smaller ones can follow.

  Args:
    config: Config of AllReduce with the planned model.
    most_flops: Most operations of the runs (`pair_flops`) of all chosen models
      together (FLOP).

  Returns:
    A config of AllReduce for each chosen model, the smallest first. There may
    be none.
  """
  chosen: dict[int, RunConfig] = {}  # By number of parameters.
  flops_left = most_flops
  for divisor in _DIVISORS:
    candidate = _smaller(config, divisor)
    if candidate is None or len(chosen) == NUM_SIZES:
      break
    size = parameter_count(candidate.model.shape)
    # Half of the operations are left for the models that are still smaller.
    if size not in chosen and pair_flops(candidate) <= flops_left / 2:
      chosen[size] = candidate
      flops_left -= pair_flops(candidate)
  return [chosen[size] for size in sorted(chosen)]


def _smaller(config: RunConfig, divisor: int) -> RunConfig | None:
  """Returns a config of AllReduce with a smaller model of the same shape.

  `divisor` divides the width, the layers and the heads. Batch, steps and
  learning rate are fitted to the smaller model. None if that cannot be, for
  example because the model is too small or trains adapters.
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
  # Example: a model of a quarter of the parameters gets a quarter of the
  # tokens, by half of the sequences in half of the steps. The number of
  # sequences stays even, so that it can be halved.
  batch = max(2 * round(global_batch(config) * math.sqrt(ratio) / 2), 2)
  tokens = config.total_steps * global_batch(config) * ratio
  steps = max(round(tokens / batch), _FEWEST_STEPS)
  warmup = round(config.inner.warmup_steps * steps / config.total_steps)
  rate = config.inner.learning_rate * ratio**_RATE_POWER
  values |= {
    "total_steps": steps,
    "data.batch_size": batch,
    # One replica on one device is enough for a small model.
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
  """Returns the sizes of a model whose width, layers and heads are divided.

  They are named as in the config's section `model`. None if the width would be
  below 8.
  """
  heads = max(shape.num_heads // divisor, 1)
  # An even width of every head, as rotary positions need it.
  width = 2 * heads * round(shape.model_dim / divisor / (2 * heads))
  if width < 8:
    return None
  # Every key-value head must serve equally many heads.
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
