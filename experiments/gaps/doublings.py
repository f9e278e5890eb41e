"""Measures how many doublings of the batch several replicas lose.

With B sequences in a step of all replicas together, the *doublings lost* say
how many times AllReduce's batch of B sequences may be halved until its loss,
after the same number of steps, is that of the replicas.

For example, AllReduce ends at loss 1.86 with 4 sequences, at 1.69 with 8 and at
1.59 with 16. Four replicas of four sequences end at 1.71. AllReduce with 16
sequences would have to lose a little more than one doubling to end there: with
8 sequences it ends at 1.69. In logarithms, ln(1.71 / 1.69) / ln(1.86 / 1.69) =
0.12 of the doubling from 4 to 8 is lost, too. So the replicas lose 1.12
doublings.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dilocox_jax.report.frame import standard_error
from experiments.gaps import tuning
from experiments.gaps.rows import GapRow
from experiments.gaps.settings import Setting


class Estimate(NamedTuple):
  """A mean over seeds.

  Attributes:
    mean: The mean.
    error: Standard error of the mean; NaN with fewer than two seeds.
  """

  mean: float
  error: float


class Cost(NamedTuple):
  """How much worse replicas end than AllReduce.

  A step has B sequences, with AllReduce and with all replicas together. The
  doublings lost say how many times AllReduce's batch may be halved until its
  loss is that of the replicas.

  Attributes:
    setting: Setting of the replicas.
    gap: Loss of the replicas divided by that of AllReduce with the same seed,
      minus 1; the mean over seeds.
    gain: s, the share by which AllReduce's loss falls if its batch grows from
      B / 2 to B sequences.
    by_last_doubling: Doublings lost, if each doubling of the batch lowers
      AllReduce's loss by the share s.
    by_curve: Doublings lost, interpolated between AllReduce's losses at all
      batches. NaN: the replicas' loss lies outside of these losses.
  """

  setting: Setting
  gap: Estimate
  gain: float
  by_last_doubling: float
  by_curve: float


def costs(
  rows_by_setting: Mapping[Setting, Sequence[GapRow]],
  field: str,
  seeds: Sequence[int] = tuning.RESULT_SEEDS,
) -> list[Cost]:
  """Returns the `Cost` of each setting of replicas whose runs are finished.

  The replicas take B sequences in a step together. A setting is left out if the
  runs of AllReduce with B or with B / 2 sequences are not finished. AllReduce
  itself has no cost, and is left out, too.

  Args:
    rows_by_setting: Finished runs of each setting.
    field: Name of the loss that is compared, a field of `GapRow`.
    seeds: The seeds whose losses are compared, all or some of
      `tuning.RESULT_SEEDS`.
  """
  losses_by_setting = {
    setting: result_losses(setting, rows, field, seeds)
    for setting, rows in rows_by_setting.items()
  }
  all_costs = []
  for setting, losses in losses_by_setting.items():
    if setting.is_allreduce or not losses:
      continue
    curve = _allreduce_curve(setting, losses_by_setting)
    full_batch = setting.global_batch
    if full_batch not in curve or full_batch // 2 not in curve:
      continue
    allreduce_losses = losses_by_setting[_allreduce(setting, full_batch)]
    all_costs.append(_cost(setting, losses, allreduce_losses, curve=curve))
  return all_costs


def result_losses(
  setting: Setting,
  rows: Sequence[GapRow],
  field: str,
  seeds: Sequence[int] = tuning.RESULT_SEEDS,
) -> dict[int, float]:
  """Returns the losses of a setting at its best rates, by seed.

  The result is empty if a run is missing, or if no rates were chosen yet.

  Args:
    setting: A setting of the study.
    rows: Finished runs of the setting.
    field: Name of the loss, a field of `GapRow`.
    seeds: The seeds, all or some of `tuning.RESULT_SEEDS`.
  """
  rates = tuning.best_rates(setting, rows)
  losses = {
    row.seed: getattr(row, field)
    for row in rows
    if row.seed in seeds
    and rates is not None
    and (row.inner_rate, row.outer_rate) == (rates.inner, rates.outer)
  }
  return losses if len(losses) == len(seeds) else {}


def gap_of(doublings: float, gain: float) -> float:
  """Returns the gap to AllReduce that a number of doublings lost means.

  The gap is the loss divided by AllReduce's, minus 1. Each doubling that is
  lost multiplies the loss by 1 / (1 - s).

  Args:
    doublings: How many times AllReduce's batch may be halved until its loss is
      that of the replicas.
    gain: s, the share by which AllReduce's loss falls when its batch doubles.
  """
  return (1 - gain) ** -doublings - 1


def _allreduce(setting: Setting, batch: int) -> Setting:
  """Returns the setting of AllReduce with `batch` sequences in a step.

  Model, text, steps, momentum and sequence length are those of `setting`.
  """
  return Setting(
    setting.size,
    replicas=1,
    batch=batch,
    steps=setting.steps,
    momentum=setting.momentum,
    source=setting.source,
    sequence_length=setting.sequence_length,
  )


def _allreduce_curve(
  setting: Setting, losses_by_setting: Mapping[Setting, Mapping[int, float]]
) -> dict[int, float]:
  """Returns AllReduce's mean loss by its batch, to compare `setting` with."""
  return {
    candidate.batch: float(np.mean(list(losses.values())))
    for candidate, losses in losses_by_setting.items()
    if losses and candidate == _allreduce(setting, candidate.batch)
  }


def _cost(
  setting: Setting,
  losses: Mapping[int, float],
  allreduce_losses: Mapping[int, float],
  curve: Mapping[int, float],
) -> Cost:
  """Computes how much worse replicas end than AllReduce, from losses by seed.

  `curve` has the mean losses of AllReduce by its batch, at least for the batch
  of all replicas and for half of it.
  """
  gaps = [losses[seed] / allreduce_losses[seed] - 1 for seed in losses]
  batch = setting.global_batch
  gain = 1 - curve[batch] / curve[batch // 2]
  loss = float(np.mean(list(losses.values())))
  # With d doublings lost, loss = (AllReduce's loss) * (1 - s)^-d.
  return Cost(
    setting=setting,
    gap=Estimate(mean=float(np.mean(gaps)), error=standard_error(gaps)),
    gain=gain,
    by_last_doubling=math.log(loss / curve[batch]) / -math.log(1 - gain),
    by_curve=math.log2(batch / _batch_with_loss(loss, curve)),
  )


def _batch_with_loss(loss: float, curve: Mapping[int, float]) -> float:
  """Returns the sequences in a step with which AllReduce ends at a given loss.

  `curve` has AllReduce's losses by batch. Between them, the logarithm of the
  batch is linear in the logarithm of the loss. The result is NaN for a loss
  outside of these losses.
  """
  batches = sorted(curve, reverse=True)
  log_losses = [math.log(curve[batch]) for batch in batches]
  log_batches = [math.log(batch) for batch in batches]
  log_batch = np.interp(
    math.log(loss), log_losses, log_batches, left=math.nan, right=math.nan
  )
  return float(np.exp(log_batch))
