"""s of the user's model and text, measured, extended or given.

The user's own model is trained if its runs fit into the time. Otherwise smaller
models of the same shape are trained, and s is extended by its power of the
number of parameters.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Sequence

from absl import logging

from dilocox_jax.checks import require
from dilocox_jax.config import RunConfig
from dilocox_jax.gap.gain import SizeGain, extended_gain, gain_of_losses
from dilocox_jax.gap.law import Estimate
from dilocox_jax.plan.model.shapes import parameter_count
from experiments.gaps.smaller_models import pair_flops, smaller_configs
from experiments.gaps.tuned_pairs import (
  PairTraining,
  TunedPair,
  allreduce_config,
  halved,
)
from experiments.runtime.process_group import usable_cores

# Assumed speeds (FLOP/s): of a core, which the quick start's model reaches
# (measured), and of an accelerator with small models.
_CORE_FLOPS_PER_S = 20e9
_ACCELERATOR_FLOPS_PER_S = 10e12
# Assumed time in which a run starts and compiles (seconds of one process).
_START_S = 15.0
_NUM_RUNS = 6  # Three rates for each of two batches.
_ACCELERATOR_PACKAGES = ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin")


@dataclasses.dataclass(frozen=True)
class MeasuredGain:
  """s, and where it comes from.

  Attributes:
    gain: s of the planned run.
    loss: Loss of AllReduce with B sequences in a step (nats a token); NaN if it
      is not known.
    kind: "measured", "extended" or "given".
    pairs: The trained models, the smallest first; empty if nothing was trained.
  """

  gain: Estimate
  loss: float
  kind: str
  pairs: Sequence[TunedPair] = ()


def gain_of_user(losses: Sequence[float]) -> MeasuredGain:
  """Returns s of two losses that the user has.

  Args:
    losses: Loss with B / 2 sequences and with B.

  Raises:
    ValueError: As `gain_of_losses`.
  """
  return MeasuredGain(gain_of_losses(losses), loss=losses[1], kind="given")


def usual_processes() -> int:
  """Returns how many runs train at once, if the user does not say.

  One process at a time can use an accelerator well. On CPUs every core trains a
  run.
  """
  return 1 if _has_accelerator() else usable_cores()


def measured(
  config: RunConfig, pairs: PairTraining, minutes: float
) -> MeasuredGain:
  """Trains AllReduce with both batches, and returns s.

  Args:
    config: Config of the planned run.
    pairs: Trains a model with both batches.
    minutes: Time that the training may take (estimated).

  Raises:
    ValueError: One line, if B is odd, or if the planned model takes too long
      and there are no two smaller models that do not.
    StoppedError: If a run failed, or if a larger batch does not lower the loss.
  """
  own = allreduce_config(config)
  halved(own)  # An odd B is found before anything is trained.
  own_minutes = _minutes(pair_flops(own), 1, pairs)
  if own_minutes <= minutes:
    logging.info(
      "training %d runs of AllReduce with the planned model, about %.1f minutes"
      " (estimated)",
      _NUM_RUNS,
      own_minutes,
    )
    pair = pairs.trained(own)
    _check_gain(pair)
    return MeasuredGain(pair.gain, pair.full.loss, "measured", [pair])
  seconds = 60 * minutes - _start_s(3, pairs)
  most_flops = seconds * _flops_per_s(pairs)
  configs = smaller_configs(own, most_flops)
  require(
    len(configs) >= 2,
    f"training takes about {own_minutes:,.0f} minutes with the planned model,"
    f" and --minutes={minutes:g} is too short for two smaller models: give more"
    " --minutes, fewer steps, or --losses",
  )
  logging.info(
    "the planned model takes about %.0f minutes (estimated), so smaller ones"
    " are trained: %s parameters",
    own_minutes,
    ", ".join(f"{parameter_count(one.model.shape):,}" for one in configs),
  )
  trained = [pairs.trained(one) for one in configs]
  for pair in trained:
    _check_gain(pair)
  gain = extended_gain(
    [SizeGain(pair.parameters, pair.gain) for pair in trained],
    parameter_count(own.model.shape),
  )
  return MeasuredGain(gain, math.nan, "extended", trained)


def _check_gain(pair: TunedPair) -> None:
  """Raises ValueError if the larger batch did not lower the loss."""
  require(
    pair.gain.value > 0,
    f"AllReduce ends at {pair.full.loss:.4f} with {pair.full.batch} sequences"
    f" in a step, and no higher with {pair.half.batch}"
    f" ({pair.half.loss:.4f}): the"
    " runs are too short or the rates too far from the best ones to say s; try"
    " more total_steps, another inner.learning_rate, or more --seeds",
  )


def _minutes(flops: float, num_sizes: int, pairs: PairTraining) -> float:
  """Returns the estimated time of the runs of some models (minutes).

  Args:
    flops: Operations of all runs.
    num_sizes: Number of models.
    pairs: The training.
  """
  return (flops / _flops_per_s(pairs) + _start_s(num_sizes, pairs)) / 60


def _start_s(num_sizes: int, pairs: PairTraining) -> float:
  """Returns the time in which the runs of some models start (seconds)."""
  return num_sizes * _NUM_RUNS * _START_S / pairs.num_processes


def _flops_per_s(pairs: PairTraining) -> float:
  """Returns the assumed speed of all processes together (FLOP/s)."""
  if _has_accelerator():
    return _ACCELERATOR_FLOPS_PER_S
  return _CORE_FLOPS_PER_S * min(pairs.num_processes, usable_cores())


def _has_accelerator() -> bool:
  """Returns whether JAX is installed for a GPU or a TPU.

  JAX is not asked, as this process would then hold the device.
  """
  return any(importlib.util.find_spec(name) for name in _ACCELERATOR_PACKAGES)
