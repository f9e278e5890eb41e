"""Measures by which share AllReduce's loss falls when its batch doubles.

This share is called s. AllReduce is trained with B / 2 and with B sequences in
a step, for equally many steps. B is the number of sequences in a step of all
replicas of the planned run together. Each of the two batches has a best rate of
its own, because a common rate would favor one of them.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from dilocox_jax.checks import flat, require
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.gap.gain import seed_error, with_error
from dilocox_jax.gap.law import Estimate
from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.report.frame import standard_error
from experiments.runtime.command_line import StoppedError
from experiments.sweeps.runs import SweepRun
from experiments.sweeps.training import Training

# Ratio of neighboring rates. So the true best rate is at most the square root
# of this ratio away from the best one that was tried.
_RATIO = 2.0
_FIRST_POINTS = (-1, 0, 1)  # Powers of the ratio that are tried at first.
# Sections of a config that belong to methods with rounds.
_ROUND_SECTIONS = (
  "sync",
  "exchange",
  "mailbox",
  "adaptive",
  "outer",
  "membership",
)


@dataclasses.dataclass(frozen=True)
class Tuned:
  """Losses of AllReduce with one size of the batch, at several inner rates.

  Attributes:
    batch: Sequences in a step of all replicas together.
    losses: Last validation loss by inner rate (nats a token); NaN means that
      the run diverged.
    rate: The rate with the lowest loss.
    is_inner: Whether rates below and above the best one were tried.
    refined: An estimate of the loss at the true best rate (derived). It is the
      lowest point of the parabola through the losses at the best rate and its
      two neighbors, over the logarithm of the rate. It is the lowest measured
      loss if a neighbor was not tried or diverged.
  """

  batch: int
  losses: Mapping[float, float]
  rate: float
  is_inner: bool
  refined: float

  @property
  def loss(self) -> float:
    """The lowest loss that was measured."""
    return self.losses[self.rate]


@dataclasses.dataclass(frozen=True)
class TunedPair:
  """AllReduce of one model, trained with B / 2 and with B sequences in a step.

  Attributes:
    parameters: Number of parameters of the model.
    steps: Number of inner steps of every run.
    half: Rates that were tried with B / 2 sequences in a step, with losses.
    full: Rates that were tried with B sequences in a step, with losses.
    gain: s, the share by which the loss falls from B / 2 to B sequences.
    num_seeds: Number of seeds behind s.
  """

  parameters: int
  steps: int
  half: Tuned
  full: Tuned
  gain: Estimate
  num_seeds: int


@dataclasses.dataclass(frozen=True)
class PairTraining:
  """Trains AllReduce with B / 2 and with B sequences in a step; computes s.

  s is the share by which the loss falls from B / 2 to B. For each of the two
  batches, several inner rates are tried, and the best one counts.

  Attributes:
    training: Trains runs, and keeps their results.
    num_processes: Number of runs that train at once.
    most_rates: Largest number of inner rates to try for a batch, at least 3.
    num_seeds: Number of seeds from which s is computed. The rates are tuned on
      the first one.
  """

  training: Training
  num_processes: int
  most_rates: int
  num_seeds: int

  def trained(self, config: RunConfig) -> TunedPair:
    """Tunes the rate of both batches, and computes s from their losses.

    Runs that are finished already are not trained again.

    Args:
      config: AllReduce with B sequences in a step (`allreduce_config`).

    Raises:
      StoppedError: If a run failed, or all rates of a batch diverged.
      ValueError: One line, if B is odd.
    """
    configs = (halved(config), config)
    half, full = self._tuned(configs)
    return TunedPair(
      parameters=parameter_count(config.model.shape),
      steps=config.total_steps,
      half=half,
      full=full,
      gain=self._gain(configs, half, full),
      num_seeds=self.num_seeds,
    )

  def _tuned(self, configs: Sequence[RunConfig]) -> list[Tuned]:
    """Tries rates for each config until the best one lies between two others.

    At most `most_rates` rates are tried for each config.
    """
    # A point p is the inner rate of the config times 2^p.
    points_by_config = [list(_FIRST_POINTS) for _ in configs]
    while True:
      # `_train` leaves out runs that are finished.
      self._train(
        [
          _run(config, _rate(config, point), config.seed)
          for config, points in zip(configs, points_by_config, strict=True)
          for point in points
        ]
      )
      tuned = []
      is_complete = True
      for config, points in zip(configs, points_by_config, strict=True):
        losses = {}
        for point in sorted(points):
          rate = _rate(config, point)
          losses[rate] = self._loss(config, rate)
        batch = tuned_batch(global_batch(config), losses)
        tuned.append(batch)
        if not batch.is_inner and len(points) < self.most_rates:
          # Example: if the lowest of the points -1, 0, 1 is the best, -2 is
          # tried next.
          is_complete = False
          is_lowest = batch.rate == min(losses)
          points.append(min(points) - 1 if is_lowest else max(points) + 1)
      if is_complete:
        return tuned

  def _gain(
    self, configs: Sequence[RunConfig], half: Tuned, full: Tuned
  ) -> Estimate:
    """Computes s, the share by which the loss falls from B / 2 to B sequences.

    With one seed, s compares the vertices of the parabolas (`Tuned.refined`).
    With several seeds, each batch is trained at its best rate on each seed, and
    s is the mean.
    """
    measured = 1 - full.loss / half.loss
    refined = 1 - full.refined / half.refined
    # The true best rates lie between the rates that were tried.
    rate_error = abs(refined - measured)
    if self.num_seeds == 1:
      error = math.hypot(seed_error(max(refined, 0.0)), rate_error)
      return with_error(refined, error)
    half_config, full_config = configs
    seeds = range(half_config.seed, half_config.seed + self.num_seeds)
    self._train(
      [
        _run(config, batch.rate, seed)
        for seed in seeds
        for config, batch in ((half_config, half), (full_config, full))
      ]
    )
    gains = [
      1
      - self._loss(full_config, full.rate, seed)
      / self._loss(half_config, half.rate, seed)
      for seed in seeds
    ]
    error = math.hypot(standard_error(gains), rate_error)
    return with_error(float(np.mean(gains)), error)

  def _train(self, runs: Sequence[SweepRun]) -> None:
    """Trains those runs that are not finished yet.

    Raises StoppedError if one of them failed.
    """
    missing = [run for run in runs if self.training.row(run) is None]
    if missing:
      self.training.train_for(
        missing,
        num_processes=self.num_processes,
        slurm="",
        max_minutes=None,
      )
    if self.training.failed:
      first = self.training.failed[0]
      raise StoppedError(
        f"{first['run']} failed: {first['reason']} (log: {first['log']})"
      )

  def _loss(
    self, config: RunConfig, rate: float, seed: int | None = None
  ) -> float:
    """Returns the loss of a finished run (nats a token); NaN: it diverged.

    The seed None is that of the config.
    """
    row = self.training.row(
      _run(config, rate, config.seed if seed is None else seed)
    )
    assert row is not None, "the run has just been trained"
    return row.loss


def allreduce_config(config: RunConfig) -> RunConfig:
  """Returns the config of AllReduce that a planned run is compared with.

  Both take the same number of sequences in a step of all replicas together.
  The model, the text, the inner optimizer, the steps and the average of the
  parameters stay. The run is evaluated only after its last step. With
  `mesh.layout` = "stacked" and without `data.mix`, all replicas become one,
  which computes the same mean gradient faster.
  """
  values = flat(config.to_mapping())
  # Sections that AllReduce does not need get their defaults.
  for path in list(values):
    section, _, _ = path.partition(".")
    if section in _ROUND_SECTIONS:
      del values[path]
  values |= {
    "sync.method": "allreduce",
    "outer.average_power": config.outer.average_power,
    "evaluation.interval_steps": 0,
  }
  if config.mesh.layout == "stacked" and not config.data.mix:
    values |= {
      "mesh.num_replicas": 1,
      "data.batch_size": global_batch(config),
    }
  return from_mapping(values)


def halved(config: RunConfig) -> RunConfig:
  """Returns the config of AllReduce with half of the sequences in a step.

  If `data.batch_size` is even, it is halved. Otherwise the number of replicas
  is halved.

  Raises:
    ValueError: One line, if the number of sequences is odd.
  """
  batch = config.data.batch_size
  replicas = config.mesh.num_replicas
  require(
    batch % 2 == 0 or replicas % 2 == 0,
    f"all replicas take {batch * replicas} sequences in a step, which cannot be"
    " halved: change data.batch_size or mesh.num_replicas",
  )
  values = flat(config.to_mapping())
  if batch % 2 == 0:
    values["data.batch_size"] = batch // 2
  else:
    values["mesh.num_replicas"] = replicas // 2
  return from_mapping(values)


def global_batch(config: RunConfig) -> int:
  """Returns B, the sequences in a step of all replicas together."""
  return config.data.batch_size * config.mesh.num_replicas


def tuned_batch(batch: int, losses: Mapping[float, float]) -> Tuned:
  """Finds the best of the rates that were tried with one size of the batch.

  Args:
    batch: Sequences in a step of all replicas together.
    losses: Loss by rate; NaN means that the run diverged.

  Raises:
    StoppedError: If all runs diverged.
  """
  rates = sorted(losses)
  finite = [rate for rate in rates if math.isfinite(losses[rate])]
  if not finite:
    raise StoppedError(
      f"all rates diverged with {batch} sequences in a step: lower"
      " inner.learning_rate"
    )
  best = min(finite, key=lambda rate: losses[rate])
  index = rates.index(best)
  is_inner = 0 < index < len(rates) - 1
  refined = losses[best]
  if is_inner:
    refined = _vertex([losses[rate] for rate in rates[index - 1 : index + 2]])
  return Tuned(
    batch=batch, losses=losses, rate=best, is_inner=is_inner, refined=refined
  )


def _vertex(losses: Sequence[float]) -> float:
  """Returns the lowest value of the parabola through three losses.

  The losses are those at three equally distant points. Without a finite
  parabola that opens upward, the result is the middle loss.
  """
  left, middle, right = losses
  curvature = left - 2 * middle + right
  if not (math.isfinite(curvature) and curvature > 0):
    return middle
  return middle - (right - left) ** 2 / (8 * curvature)


def _rate(config: RunConfig, point: int) -> float:
  """Returns the config's inner rate times 2^point, with four digits."""
  return float(f"{config.inner.learning_rate * _RATIO**point:.4g}")


def _run(config: RunConfig, rate: float, seed: int) -> SweepRun:
  """Returns a run of AllReduce with an inner rate and a seed."""
  values = flat(config.to_mapping()) | {
    "inner.learning_rate": rate,
    "seed": seed,
  }
  parameters = parameter_count(config.model.shape)
  name = f"{parameters:,} parameters, B={global_batch(config)}, rate {rate:g}"
  return SweepRun(name, from_mapping(values))
