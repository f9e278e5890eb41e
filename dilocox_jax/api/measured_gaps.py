"""Measured gaps: how much higher a method's last loss is than AllReduce's.

A gap is (loss of the method / loss of AllReduce) - 1 after the same number of
steps on the same number of sequences. All gaps were measured on one small model
(0.86 million parameters, 2,000 steps). Both sides had the same inner optimizer
and the same average of the parameters. No gap was measured on a large model.

The gaps are in `measured_gaps.json`. `experiments.sweeps.measured` writes this
file from the committed runs.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from dilocox_jax.report.units import human_gap

PATH = pathlib.Path(__file__).with_name("measured_gaps.json")


@dataclasses.dataclass(frozen=True)
class MeasuredGap:
  """One measured setting of a method.

  Attributes:
    name: Name of the runs in their file, e.g. "overlap_loco 2x4".
    method: Name of the method.
    num_replicas: Number of replicas of the runs, M.
    sequences: Sequences of a replica's step.
    steps: Inner steps of the runs.
    seeds: Number of seeds.
    gap: Mean loss divided by the mean loss of AllReduce, minus 1.
    error: Standard error of the gap over the seeds.
    inner_rate: Inner learning rate, which was tuned for the small model.
    settings: Other fields of the config of the runs, by dotted name.
    rows: File of the runs.
  """

  name: str
  method: str
  num_replicas: int
  sequences: int
  steps: int
  seeds: int
  gap: float
  error: float
  inner_rate: float
  settings: Mapping[str, Any]
  rows: str

  @property
  def size(self) -> str:
    """Numbers of replicas and of sequences, e.g. "2 x 4"."""
    return f"{self.num_replicas} x {self.sequences}"

  @property
  def words(self) -> str:
    """The gap with its error and the setting in which it was measured."""
    size = self.size
    sync_interval = self.settings.get("sync.sync_interval")
    if sync_interval:
      size += f", H = {sync_interval}"
    optimizer = self.settings["inner.optimizer"]
    if "inner.momentum" in self.settings:
      optimizer += f" with momentum {self.settings['inner.momentum']}"
    average = "no average"
    if self.settings.get("outer.average_power"):
      average = "an average"
    outer_rate = self.settings["outer.learning_rate"]
    return (
      f"{human_gap(self.gap, self.error)} ({size}, {optimizer}, {average}; "
      f"inner rate {self.inner_rate:.3g}, outer {outer_rate:g})"
    )


@functools.cache
def _content() -> dict[str, Any]:
  """Returns the content of `measured_gaps.json`."""
  return json.loads(PATH.read_text())


def measured_gaps(method: str, num_replicas: int) -> list[MeasuredGap]:
  """Returns the gaps of a method at the measured number of replicas nearest M.

  Args:
    method: Name of the method.
    num_replicas: Number of replicas of the run, M. If two measured numbers are
      equally near, as 2 and 8 are to 4, the larger one is taken, because its
      gap is larger.
  """
  gaps_of_method = []
  for fields in _content()["gaps"]:
    gap = MeasuredGap(**fields)
    if gap.method == method:
      gaps_of_method.append(gap)
  if not gaps_of_method:
    return []

  def distance(gap: MeasuredGap) -> tuple[float, int]:
    doublings = abs(math.log2(gap.num_replicas / num_replicas))
    return round(doublings, 6), -gap.num_replicas

  nearest = min(gaps_of_method, key=distance).num_replicas
  return [gap for gap in gaps_of_method if gap.num_replicas == nearest]


def share_of_more_steps(ratio: float) -> float:
  """Returns by which factor the loss changes with more steps.

  The factor is that of AllReduce between 2,000 and 17,000 steps. Example: with
  twice as many steps the loss ends 6.6 % lower (derived from measured losses of
  a small model).

  Args:
    ratio: Number of steps divided by the number of steps of another run.
  """
  return ratio ** -_content()["exponent"]["value"]
