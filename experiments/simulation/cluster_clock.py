"""Simulated time of a real run, as if it ran on a given cluster."""

from typing import Any

from dilocox_jax.config import RunConfig
from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment
from dilocox_jax.plan.wire.traffic import Traffic
from dilocox_jax.simulate.analytic import AnalyticClock
from dilocox_jax.simulate.cluster_file import cluster_text
from dilocox_jax.simulate.script import Script
from experiments.simulation.setup import Options, set_up


class ClusterClock:
  """Adds up the cost of the trainer's own segments by formula."""

  def __init__(self, config: RunConfig, cluster: str, options: Options):
    """Starts at zero.

    Args:
      config: Config of the run.
      cluster: Name of a preset, or path of a file.
      options: What config and cluster leave open.

    Raises:
      ValueError: One line that says what does not fit.
    """
    setup = set_up(config, cluster, options)
    self._copied_bytes = setup.script.copied_bytes
    self._clock = AnalyticClock(setup.link_costs, setup.work)
    # Stages change the seconds of a step, too.
    step_s = setup.steps.seconds.tolist()
    self._name = f"{cluster_text(setup.link_costs.cluster)} {options} {step_s}"
    self._asked_for = cluster

  def advance(self, segment: Segment, traffic: Traffic) -> float:
    """Goes through a segment; returns seconds since the run's start."""
    script = Script(traffic, self._copied_bytes)
    return self._clock.walk(script.segment(segment)).now_s

  def finish(self, plan: RunPlan, traffic: Traffic) -> float:
    """Goes through the final flush; returns seconds since the start."""
    return self._clock.walk(Script(traffic).flush(plan)).now_s

  def get_state(self) -> dict[str, Any]:
    """Returns what a checkpoint must hold, as plain values."""
    return {"cluster": self._name, "clock": self._clock.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from what `get_state` returned."""
    if state["cluster"] != self._name:
      raise ValueError(
        f"--cluster={self._asked_for} or --step_s differs from what the run "
        "began with: set it back, or take another --workdir"
      )
    self._clock.set_state(state["clock"])
