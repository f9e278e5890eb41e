"""A simulated clock that a run may carry: its time on some cluster.

The trainer advances it after every segment and records what it returns. Nothing
else reads it, so no loss can depend on a link. `api.simulation_setup` makes
one from a cluster's description.
"""

from typing import Any, Protocol, runtime_checkable

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment


@runtime_checkable
class Clock(Protocol):
  """Simulated time of a run.

  Attributes:
    description: What is timed, for reports, e.g. "cluster 1gbit".
    digest: Short digest of all that its times depend on beside the run.
  """

  description: str
  digest: str

  def advance(self, segment: Segment, traffic: Traffic) -> float:
    """Advances by a segment; returns seconds since the start of the run.

    Args:
      segment: Next segment of the run.
      traffic: Bytes that its exchanges send.
    """
    ...

  def finish(self, plan: RunPlan, traffic: Traffic) -> float:
    """Advances by the flush; returns seconds since the start of the run.

    Args:
      plan: Plan of the run.
      traffic: Bytes that the exchanges of the flush send.
    """
    ...

  def get_state(self) -> dict[str, Any]:
    """Returns what a checkpoint must hold, as plain values."""
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues from what `get_state` returned.

    Raises:
      ValueError: If that was the clock of another cluster.
    """
    ...
