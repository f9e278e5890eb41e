"""The settings of a study: are short rounds early in a run worth their bytes?

All settings with rounds make 16 exchanges in 256 steps, so they send equally
many bytes. They differ in the steps after which they exchange, in the outer
step, or in both.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dilocox_jax.config import to_plan
from experiments.gaps.settings import Rates, Run, Setting


@dataclasses.dataclass(frozen=True)
class GrowingSetting(Setting):
  """A `Setting` with rounds that may grow, and with other outer steps.

  Attributes:
    first_interval: Number of inner steps of the first rounds; 0: all rounds
      have `interval` steps.
    steps_per_doubling: Inner steps between two doublings of the length of a
      round. The length grows up to `interval`. 0: it does not double.
    outer_schedule: Schedule of the outer rate, "constant" or "cosine".
    outer_optimizer: Name of the outer optimizer. With "schedule_free_sgd", its
      own average is evaluated in place of the usual average of the outer
      parameters.
  """

  first_interval: int = 0
  steps_per_doubling: int = 0
  outer_schedule: str = "constant"
  outer_optimizer: str = "sgd"

  def __post_init__(self):
    """Raises ValueError if a run with rounds does not end with a whole one."""
    if self.is_allreduce:
      return
    config = self.config(Run(Rates(inner=1.0, outer=1.0), seed=0))
    plan = to_plan.run_plan(config)
    last = list(plan.segments())[-1]
    if not last.windows[-1].sent:
      raise ValueError(f"{self.name}: the last round of the run is not whole")

  @property
  def num_exchanges(self) -> int:
    """Number of outer steps plus number of data-parallel steps in a run."""
    if self.is_allreduce:
      return self.steps
    config = self.config(Run(Rates(inner=1.0, outer=1.0), seed=0))
    segments = list(to_plan.run_plan(config).segments())
    rounds = [segment for segment in segments if segment.phase == "rounds"]
    return self.warm_start + len(rounds)

  def _shared_values(self) -> dict[str, Any]:
    values = super()._shared_values()
    if self.outer_optimizer != "sgd":
      values["outer.average_power"] = 0.0
    return values

  def _method_values(self, run: Run) -> dict[str, Any]:
    values = super()._method_values(run)
    if self.is_allreduce:
      return values
    values["outer.schedule"] = self.outer_schedule
    values["outer.optimizer"] = self.outer_optimizer
    if self.outer_optimizer != "sgd":
      del values["outer.momentum"]
    if self.first_interval:
      values["sync.first_interval"] = self.first_interval
      values["sync.steps_per_doubling"] = self.steps_per_doubling
    return values


_CONSTANT = GrowingSetting("26k", replicas=4, batch=4, steps=256, interval=16)
# Rounds of 6 x 4, 3 x 8, 16 and 6 x 32 steps.
_GROWING = dataclasses.replace(
  _CONSTANT, interval=32, first_interval=4, steps_per_doubling=21
)

SETTINGS: Mapping[str, GrowingSetting] = {
  "constant": _CONSTANT,
  "growing_4_to_32": _GROWING,
  # Rounds of 8 x 8, 4 x 16 and 4 x 32 steps.
  "growing_8_to_32": dataclasses.replace(
    _CONSTANT, interval=32, first_interval=8, steps_per_doubling=64
  ),
  # 8 data-parallel steps, and 8 rounds of 31 steps.
  "start_of_8": dataclasses.replace(_CONSTANT, interval=31, warm_start=8),
  "cosine": dataclasses.replace(_CONSTANT, outer_schedule="cosine"),
  "schedule_free": dataclasses.replace(
    _CONSTANT, outer_optimizer="schedule_free_sgd"
  ),
  "growing_and_cosine": dataclasses.replace(_GROWING, outer_schedule="cosine"),
  "allreduce": GrowingSetting("26k", replicas=1, batch=16, steps=256),
}
# Pairs of rates that are tried: inner rate, and outer rate of the first round.
_RATES = (Rates(0.04, 1.0), Rates(0.0566, 1.0))
_LOWER_RATES = (Rates(0.0283, 1.0), Rates(0.02, 1.0))
# These settings try higher rates, because their outer steps are shorter on
# average: the outer rate falls to 0, or the outer step moves an average.
_HIGHER_RATES = (
  Rates(0.0566, 1.0),
  Rates(0.04, 1.4),
  Rates(0.0566, 1.4),
  Rates(0.04, 2.0),
  Rates(0.0566, 2.0),
  Rates(0.04, 2.8),
)
RATES: Mapping[str, tuple[Rates, ...]] = {
  "constant": (*_LOWER_RATES, *_RATES, Rates(0.08, 1.0)),
  "growing_4_to_32": (*_LOWER_RATES, *_RATES),
  "growing_8_to_32": _RATES,
  "start_of_8": _RATES,
  "cosine": _HIGHER_RATES,
  "schedule_free": _HIGHER_RATES,
  "growing_and_cosine": _HIGHER_RATES,
  "allreduce": (Rates(0.0283), Rates(0.04), Rates(0.0566)),
}
