"""A run that is planned, and which of several tuning runs ended lowest."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dilocox_jax.config import RunConfig


@dataclasses.dataclass(frozen=True)
class RequiredRun:
  """A run to be made.

  Attributes:
    task: One of `TASKS`.
    method: Name of its method.
    changed: Dotted fields over the sweep's base.
    config: All of it, checked.
  """

  task: str
  method: str
  changed: Mapping[str, Any]
  config: RunConfig

  @property
  def seed(self) -> int:
    """Of the run."""
    return self.config.seed

  @property
  def ends_round(self) -> bool:
    """Whether its last step ends a round, so that none is cut short."""
    sync = self.config.sync
    steps = self.config.total_steps - sync.warm_start_steps
    return steps % sync.named.schedule.sync_interval == 0


class NotTunedError(Exception):
  """Tuning of a method is not over, or no setting works."""


# The final loss of a run that has been made; None: not yet; NaN: diverged.
LossOf = Callable[[RequiredRun], float | None]


@dataclasses.dataclass(frozen=True)
class Tuned:
  """What tuning found.

  Attributes:
    changed: Fields that the method runs with, over its own.
    loss: Of the best tuning run.
    num_runs: Tuning runs, those that diverged included.
    at_edge: Whether the best inner learning rate, warm-up or outer step
      (rate over one less momentum) is an end of what was tried.
  """

  changed: Mapping[str, Any]
  loss: float
  num_runs: int
  at_edge: bool


def lowest(runs: Sequence[RequiredRun], loss_of: LossOf) -> RequiredRun:
  """The run that ended lowest.

  Raises:
    NotTunedError: One has not ended, or all diverged.
  """
  missing = [run for run in runs if loss_of(run) is None]
  if missing:
    raise NotTunedError(
      f"{len(missing)} of {len(runs)} tuning runs of {runs[0].method!r} are"
      " missing: run --task=tune_inner, then --task=tune_outer, with it among"
      " --methods"
    )
  losses = [value(loss_of(run)) for run in runs]
  best = min(range(len(runs)), key=losses.__getitem__)
  if math.isinf(losses[best]):
    raise NotTunedError(
      f"every tuning run of {runs[0].method!r} diverged: add lower rates to"
      " tuning.inner_learning_rates"
    )
  return runs[best]


def value(loss: float | None) -> float:
  """A loss to compare by: one that diverged is infinitely high."""
  return loss if loss is not None and math.isfinite(loss) else math.inf
