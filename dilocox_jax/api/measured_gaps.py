"""How much more loss a method ends with than AllReduce, as far as measured.

A gap is (loss of the method / loss of AllReduce) - 1 after equally many steps
on equally many sequences. All were measured on one small model (0.86 million
parameters, 2,000 steps), with the same inner optimizer on both sides, and with
the same average of the parameters. Nobody measured them for large models.

`measured_gaps.json` holds them; `experiments.sweeps.measured` writes it from
the committed runs.
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
    num_replicas: M of the runs.
    sequences: Sequences of a replica's step.
    steps: Inner steps of the runs.
    seeds: Number of seeds.
    gap: Mean loss over that of AllReduce, minus 1.
    error: Standard error of the gap over the seeds.
    inner_rate: Inner learning rate, which suited the small model.
    settings: What else the config of the runs says, by dotted name.
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
    """Replicas and sequences, e.g. "2 x 4"."""
    return f"{self.num_replicas} x {self.sequences}"

  @property
  def words(self) -> str:
    """The gap with its error and what it was measured with."""
    said = self.settings
    interval = said.get("sync.sync_interval")
    rounds = f", H = {interval}" if interval else ""
    average = said.get("outer.average_power", 0.0)
    optimizer = said["inner.optimizer"]
    if "inner.momentum" in said:
      optimizer += f" with momentum {said['inner.momentum']}"
    return (
      f"{human_gap(self.gap, self.error)} ({self.size}{rounds}, "
      f"{optimizer}, {'an' if average else 'no'} average; inner "
      f"rate {self.inner_rate:.3g}, outer {said['outer.learning_rate']:g})"
    )


@functools.cache
def _content() -> dict[str, Any]:
  return json.loads(PATH.read_text())


def measured_gaps(method: str, num_replicas: int) -> list[MeasuredGap]:
  """Returns what was measured of a method at the nearest number of replicas.

  Args:
    method: Name of the method.
    num_replicas: M of the run. Of two numbers that are equally near, as two
      and eight are to four, the larger counts, whose gap is larger.
  """
  found = [MeasuredGap(**gap) for gap in _content()["gaps"]]
  found = [gap for gap in found if gap.method == method]
  if not found:
    return []

  def distance(gap: MeasuredGap) -> tuple[float, int]:
    doublings = abs(math.log2(gap.num_replicas / num_replicas))
    return round(doublings, 6), -gap.num_replicas

  nearest = min(found, key=distance).num_replicas
  return [gap for gap in found if gap.num_replicas == nearest]


def share_of_more_steps(ratio: float) -> float:
  """Returns the factor of the loss after `ratio` times as many steps.

  It is that of AllReduce between 2,000 and 17,000 steps: twice as many steps
  end 6.6 % lower (derived from measured losses of a small model).

  Args:
    ratio: Number of steps over that of another run.
  """
  return ratio ** -_content()["exponent"]["value"]
