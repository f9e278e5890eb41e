"""The clock of a real run: what it would have cost on a cluster."""

from typing import Any

from dilocox_jax.config import RunConfig
from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment
from dilocox_jax.plan.wire.traffic import Traffic
from dilocox_jax.simulate.analytic import AnalyticClock
from dilocox_jax.simulate.cluster_file import cluster_text
from dilocox_jax.simulate.script import Script
from experiments.simulation.setup import Options, set_up


class ClusterClock:
  """Walks the trainer's own segments by formula."""

  def __init__(self, config: RunConfig, cluster: str, options: Options):
    """Starts at zero.

    Args:
      config: The run.
      cluster: Preset or file.
      options: What both leave open.

    Raises:
      ValueError: One line that says what does not fit.
    """
    made = set_up(config, cluster, options)
    self._copied_bytes = made.script.copied_bytes
    self._clock = AnalyticClock(made.link_costs, made.work)
    step_s = made.steps.seconds.tolist()  # Stages change them, too.
    self._name = f"{cluster_text(made.link_costs.cluster)} {options} {step_s}"
    self._asked_for = cluster

  def advance(self, segment: Segment, traffic: Traffic) -> float:
    """Goes through a segment; seconds since the start of the run."""
    script = Script(traffic, self._copied_bytes)
    return self._clock.walk(script.segment(segment)).now_s

  def finish(self, plan: RunPlan, traffic: Traffic) -> float:
    """Goes through the flush at the end of a run; likewise."""
    return self._clock.walk(Script(traffic).flush(plan)).now_s

  def get_state(self) -> dict[str, Any]:
    """What a checkpoint must hold, as plain values."""
    return {"cluster": self._name, "clock": self._clock.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from `get_state`."""
    if state["cluster"] != self._name:
      raise ValueError(
        f"--cluster={self._asked_for} or --step_s differs from what the run "
        "began with: set it back, or take another --workdir"
      )
    self._clock.set_state(state["clock"])
