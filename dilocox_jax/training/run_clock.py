"""Interface of a clock that simulates how long a run takes on a cluster."""

from typing import Any, Protocol

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment


class Clock(Protocol):
  """Simulated time of a run on a cluster.

  The trainer advances the clock after every segment (a part of the run, such as
  a round) and records the time. Training never reads the clock.
  `api.simulation_setup` makes a clock from the description of a cluster.

  Attributes:
    description: Name of the simulated cluster for reports, e.g. "cluster
      1gbit".
    digest: Short digest of everything that the times depend on, except the
      run itself.
  """

  description: str
  digest: str

  def advance(self, segment: Segment, traffic: Traffic) -> float:
    """Advances the clock by a segment.

    Args:
      segment: Next segment of the run, such as a round.
      traffic: Computes the bytes that the segment's exchanges send.

    Returns:
      Simulated seconds since the start of the run.
    """
    ...

  def finish(self, plan: RunPlan, traffic: Traffic) -> float:
    """Advances the clock by the flush, the exchanges that end a run.

    Args:
      plan: Plan of the run.
      traffic: Computes the bytes that the exchanges of the flush send.

    Returns:
      Simulated seconds since the start of the run.
    """
    ...

  def get_state(self) -> dict[str, Any]:
    """Returns the state of the clock for a checkpoint, as JSON values."""
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores the clock from a state that `get_state` returned.

    Raises:
      ValueError: If the state is from a clock with another cluster or another
        duration of a step.
    """
    ...
