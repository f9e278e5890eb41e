"""Measured gaps: how much higher a method's final loss is than AllReduce's.

A gap is (loss of the method / loss of AllReduce) - 1 after equally many steps
on equally many sequences. All gaps were measured on one small model (0.86
million parameters, 2,000 steps). `experiments.sweeps.measured` computes them
from the runs in docs/results/runs.csv, and writes them to `measured_gaps.json`.
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
  """The gap of a method with certain settings, measured by runs of some seeds.

  Attributes:
    name: Name of the method's runs in docs/results/runs.csv, e.g. "overlap_loco
      2x4".
    baseline: Name of the AllReduce runs with which the method's runs are
      compared.
    method: Name of the method.
    num_replicas: Number of replicas of the runs, M.
    sequences: Number of sequences in a step of one replica.
    steps: Number of inner steps of each run.
    seeds: Number of seeds. There is one run for each seed.
    gap: Mean final loss of the method's runs divided by AllReduce's, minus 1:
      0.0078 is a loss that is 0.78 % higher.
    error: Standard error of the gap over the seeds, as a fraction like `gap`.
    inner_rate: Inner learning rate, which was tuned for the small model.
    settings: More fields of the runs' config, such as the codec, by dotted
      name.
    study: Name of the runs' sweep, the column `study` of that file.
  """

  name: str
  baseline: str
  method: str
  num_replicas: int
  sequences: int
  steps: int
  seeds: int
  gap: float
  error: float
  inner_rate: float
  settings: Mapping[str, Any]
  study: str

  @property
  def size(self) -> str:
    """Number of replicas, and of sequences in a step of each: "2 x 4"."""
    return f"{self.num_replicas} x {self.sequences}"

  @property
  def words(self) -> str:
    """The gap, its error and the most important settings, in words."""
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
  """Returns a method's gaps, measured with the nearest number of replicas.

  Of the numbers with which the method was measured, the one that is nearest to
  `num_replicas` by ratio is taken. If two numbers are equally near, the larger
  one is taken: 8 rather than 2 for 4 replicas. The result is [] if the method
  was not measured.
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
    # Equally near numbers must stay equal in spite of rounding errors.
    return round(doublings, 6), -gap.num_replicas

  nearest = min(gaps_of_method, key=distance).num_replicas
  return [gap for gap in gaps_of_method if gap.num_replicas == nearest]


def share_of_more_steps(ratio: float) -> float:
  """Returns the factor by which more or fewer steps change the final loss.

  It is a power of `ratio`, fitted to AllReduce runs of 2,000 and 17,000 steps
  of a small model: twice as many steps multiply the loss by 0.934.

  Args:
    ratio: Number of steps divided by that of the run whose loss is known.
  """
  return ratio ** -_content()["exponent"]["value"]
