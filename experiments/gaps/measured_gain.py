"""Measures how much AllReduce gains from a larger batch.

Let B be the number of sequences in a step of all replicas of the planned run
together. AllReduce is trained with B / 2 and with B sequences in a step, for
equally many steps. The result is s, the share by which the second loss is lower
than the first. If the planned model takes too long to train, s is extrapolated
from smaller models of about the same shape.
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
from experiments.gaps.smaller_models import (
  NUM_SIZES,
  pair_flops,
  smaller_configs,
)
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
  """What AllReduce gains from a larger batch, and the runs that say so.

  B is the number of sequences in a step of all replicas of the planned run.

  Attributes:
    gain: s of the planned run, with its range. It is the share by which the
      loss falls from B / 2 to B sequences in a step.
    loss: Loss of AllReduce with B sequences in a step (nats a token); NaN if it
      is not known.
    kind: "measured" on the planned model, "extended" (extrapolated) from
      smaller models, or "given" by the user.
    pairs: Results of the trained models, the smallest model first; empty if
      nothing was trained.
  """

  gain: Estimate
  loss: float
  kind: str
  pairs: Sequence[TunedPair] = ()


def gain_of_user(losses: Sequence[float]) -> MeasuredGain:
  """Computes from two known losses what AllReduce gains from a doubled batch.

  Args:
    losses: Losses of AllReduce with B / 2 and with B sequences in a step (nats
      a token).

  Raises:
    ValueError: If there are not two positive losses, or if the second is not
      the lower one.
  """
  return MeasuredGain(gain_of_losses(losses), loss=losses[1], kind="given")


def usual_processes() -> int:
  """Returns how many runs train at once by default.

  It is one for each core, or a single one if JAX is installed for a GPU or a
  TPU.
  """
  return 1 if _has_accelerator() else usable_cores()


def measured(
  config: RunConfig, pairs: PairTraining, minutes: float
) -> MeasuredGain:
  """Trains AllReduce with B / 2 and B sequences in a step; compares the losses.

  If the planned model would take too long, smaller models are trained.

  Args:
    config: Config of the planned run. B is the number of sequences in a step of
      all its replicas together.
    pairs: Trains a model with both batches.
    minutes: Most minutes that the training may take, by an estimate.

  Raises:
    ValueError: One line, if B is odd, if `minutes` are too few even for two
      smaller models, or if the larger batch does not lower the loss.
    StoppedError: If a run failed, or if all rates of a batch diverged.
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
  seconds = 60 * minutes - _start_s(NUM_SIZES, pairs)
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
  """Estimates the minutes that runs of some models take, starts included."""
  return (flops / _flops_per_s(pairs) + _start_s(num_sizes, pairs)) / 60


def _start_s(num_sizes: int, pairs: PairTraining) -> float:
  """Estimates the seconds in which runs of some models start and compile."""
  return num_sizes * _NUM_RUNS * _START_S / pairs.num_processes


def _flops_per_s(pairs: PairTraining) -> float:
  """Returns the assumed speed of all processes together (FLOP/s)."""
  if _has_accelerator():
    return _ACCELERATOR_FLOPS_PER_S
  return _CORE_FLOPS_PER_S * min(pairs.num_processes, usable_cores())


def _has_accelerator() -> bool:
  """Returns whether JAX is installed for a GPU or a TPU."""
  # JAX is not asked, as this process would then hold the device.
  return any(importlib.util.find_spec(name) for name in _ACCELERATOR_PACKAGES)
