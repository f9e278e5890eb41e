"""Measures how many doublings of the batch several replicas lose.

Letters: M replicas, B sequences in a step of all replicas together. L(B) is the
loss of AllReduce with B sequences in a step, after the same number of steps. It
falls as B grows. The *doublings lost* by M replicas say how far AllReduce's
batch may shrink until its loss is theirs.

For example, AllReduce ends at loss 1.86 with 4 sequences, at 1.69 with 8 and at
1.59 with 16. Four replicas of four sequences end at 1.71. This lies a little
above the loss of 8 sequences, so they lose a little more than one doubling. In
logarithms ln(1.71 / 1.69) / ln(1.86 / 1.69) = 0.12 of the doubling from 4 to 8
is lost too, so D = 1.12.

Two numbers describe the same loss. `by_curve` reads AllReduce's losses at all
batches, as in the example. `by_last_doubling` extends the last doubling, from
B / 2 to B, to any loss. It needs two losses of AllReduce only, so a user can
compute a gap from it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

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
  """What several replicas cost beside AllReduce with as many sequences a step.

  Attributes:
    setting: Setting of the replicas.
    gap: Loss of the replicas over that of AllReduce, less one; the seeds are
      paired.
    gain: s, the share by which AllReduce's loss falls from B / 2 to B.
    by_last_doubling: Doublings lost, if all of them gain s.
    by_curve: Doublings lost, by AllReduce's losses at all batches. NaN: the
      loss lies outside of these losses.
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
  """Returns the costs of all settings whose runs are finished.

  A setting is left out if it is AllReduce, or if AllReduce with B or B / 2
  sequences is not finished.

  Args:
    rows_by_setting: Finished runs of each setting.
    field: The loss that is compared, a field of `GapRow`.
    seeds: Result seeds whose losses are compared.
  """
  losses_by_setting = {
    setting: result_losses(setting, rows, field, seeds)
    for setting, rows in rows_by_setting.items()
  }
  found = []
  for setting, losses in losses_by_setting.items():
    if setting.is_allreduce or not losses:
      continue
    curve = _allreduce_curve(setting, losses_by_setting)
    full = _allreduce(setting, setting.global_batch)
    if not {setting.global_batch, setting.global_batch // 2} <= set(curve):
      continue
    found.append(_cost(setting, losses, losses_by_setting[full], curve=curve))
  return found


def result_losses(
  setting: Setting,
  rows: Sequence[GapRow],
  field: str,
  seeds: Sequence[int] = tuning.RESULT_SEEDS,
) -> dict[int, float]:
  """Returns the losses of result seeds at the best rates, by seed.

  Args:
    setting: The setting.
    rows: Finished runs of the setting.
    field: A field of `GapRow` with a loss.
    seeds: The seeds, of `tuning.RESULT_SEEDS`.

  Returns:
    The losses; empty if a run is missing.
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
  """Returns the gap of replicas that lose some doublings.

  Each doubling multiplies the loss by 1 / (1 - s).

  Args:
    doublings: Doublings lost.
    gain: s, the share by which AllReduce's loss falls when B doubles.
  """
  return (1 - gain) ** -doublings - 1


def _allreduce(setting: Setting, batch: int) -> Setting:
  """Returns AllReduce with the model, text and steps of a setting."""
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
  """Returns the mean loss of AllReduce by its number of sequences a step.

  Args:
    setting: Setting of several replicas, whose model and steps are taken.
    losses_by_setting: Losses of each setting, by seed.
  """
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
  """Compares replicas with AllReduce.

  Args:
    setting: Setting of the replicas.
    losses: Their losses, by seed.
    allreduce_losses: Losses of AllReduce with as many sequences a step, by
      seed.
    curve: Mean loss of AllReduce, by number of sequences a step. It has the
      batch of the replicas together, and half of it.
  """
  gaps = [losses[seed] / allreduce_losses[seed] - 1 for seed in losses]
  error = math.nan
  if len(gaps) > 1:
    error = float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps))
  batch = setting.global_batch
  gain = 1 - curve[batch] / curve[batch // 2]
  loss = float(np.mean(list(losses.values())))
  return Cost(
    setting=setting,
    gap=Estimate(mean=float(np.mean(gaps)), error=error),
    gain=gain,
    by_last_doubling=math.log(loss / curve[batch]) / -math.log(1 - gain),
    by_curve=math.log2(batch / _batch_with_loss(loss, curve)),
  )


def _batch_with_loss(loss: float, curve: Mapping[int, float]) -> float:
  """Returns the batch with which AllReduce ends at a loss.

  Between two batches the logarithm of the batch is linear in the logarithm of
  the loss.

  Args:
    loss: The loss.
    curve: Loss of AllReduce, by batch.

  Returns:
    The batch; NaN if the loss is higher or lower than all of AllReduce's.
  """
  batches = sorted(curve, reverse=True)
  log_losses = [math.log(curve[batch]) for batch in batches]
  log_batches = [math.log(batch) for batch in batches]
  log_batch = np.interp(
    math.log(loss), log_losses, log_batches, left=math.nan, right=math.nan
  )
  return float(np.exp(log_batch))
