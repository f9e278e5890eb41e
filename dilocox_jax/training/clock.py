"""A clock that a run may carry: what it would have cost elsewhere.

The trainer shows it every segment and writes down what it says, and never
reads it, so that no loss can depend on a link. Who makes one, and from what,
is none of the trainer's business.
"""

from typing import Any, Protocol, runtime_checkable

from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment
from dilocox_jax.plan.wire.traffic import Traffic


@runtime_checkable
class Clock(Protocol):
  """Simulated time of a run."""

  def advance(self, segment: Segment, traffic: Traffic) -> float:
    """Goes through a segment; seconds since the start of the run."""
    ...

  def finish(self, plan: RunPlan, traffic: Traffic) -> float:
    """Goes through the flush at the end of a run; likewise."""
    ...

  def get_state(self) -> dict[str, Any]:
    """What a checkpoint must hold, as plain values."""
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from `get_state`.

    Raises:
      ValueError: If it is of another cluster.
    """
    ...
