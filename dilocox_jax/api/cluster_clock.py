"""Computes the time that a real run would take on a simulated cluster."""

import hashlib
from typing import Any

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.api.simulation_setup import Options, set_up
from dilocox_jax.checks import require
from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment
from dilocox_jax.simulate.analytic import AnalyticClock
from dilocox_jax.simulate.script import Script


class ClusterClock:
  """Adds up the simulated time of the segments that the trainer runs.

  Attributes:
    description: What is timed, for reports, e.g. "cluster 1gbit".
    digest: Short digest of the cluster and of all durations.
  """

  def __init__(
    self,
    config: RunConfig,
    cluster: str,
    options: Options,
    timed: RunConfig | None = None,
  ):
    """Starts the clock at 0 seconds.

    Args:
      config: Config of the run.
      cluster: Name of a cluster preset, or path of a cluster file.
      options: Settings of the simulation that config and cluster do not have.
      timed: Config of a run with the same schedule, whose steps and exchanges
        are timed in place of those of the run: usually the same method with a
        larger model. None times the run itself.

    Raises:
      ValueError: If the config does not fit the cluster or the options, or the
        schedule of `timed` is not that of the run. The message has one line.
    """
    self._timed_traffic = None
    if timed:
      _check_schedules(config, timed)
      self._timed_traffic = to_plan.traffic(timed)
    setup = set_up(timed or config, cluster, options)
    self._copied_bytes = setup.script.copied_bytes
    self._clock = AnalyticClock(setup.link_costs, setup.work)
    # The name also has the duration of a step, because pipeline stages change
    # it even if cluster and options stay the same.
    step_s = setup.work.step_s.tolist()
    self._name = f"{setup.link_costs.cluster} {options} {step_s}"
    self.description = f"cluster {setup.link_costs.cluster.name}"
    if timed:
      self._name += f" {timed.model.shape}"
      count = parameter_count(timed.model.shape)
      self.description += f", for a model of {count / 1e9:.3g} B parameters"
    self.digest = hashlib.sha256(self._name.encode()).hexdigest()[:12]
    self._asked_for = cluster

  def advance(self, segment: Segment, traffic: Traffic) -> float:
    """Adds the time of a segment; returns seconds since the run's start.

    Args:
      segment: The segment, as in `Clock.advance`.
      traffic: Bytes of the exchanges; not read where another run is timed.
    """
    script = Script(self._timed_traffic or traffic, self._copied_bytes)
    return self._clock.walk(script.segment(segment)).now_s

  def finish(self, plan: RunPlan, traffic: Traffic) -> float:
    """Adds the time of the flush; returns seconds since the run's start.

    Args:
      plan: Plan of the run, as in `Clock.finish`.
      traffic: Bytes of the exchanges, as in `advance`.
    """
    script = Script(self._timed_traffic or traffic)
    return self._clock.walk(script.flush(plan)).now_s

  def get_state(self) -> dict[str, Any]:
    """Returns the state that a checkpoint saves, as values that JSON can hold.

    Returns:
      The description of the cluster ("cluster"), with which `set_state` checks
      that the same cluster is simulated, and the times so far ("clock").
    """
    return {"cluster": self._name, "clock": self._clock.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    """Sets the clock to a state that `get_state` returned.

    Raises:
      ValueError: If the state belongs to another cluster, another number of
        replicas or another duration of a step.
    """
    times_s, count = state["clock"]["_now"], self._clock.num_replicas
    require(
      len(times_s) == count,
      f"mesh.num_replicas={count}, but --cluster={self._asked_for} has timed"
      f" {len(times_s)} replicas so far: keep their number, or take another"
      " --workdir",
    )
    if state["cluster"] != self._name:
      raise ValueError(
        f"--cluster={self._asked_for} or --step_s is not the one with which "
        "the run began: give the old flags again, or take another --workdir"
      )
    self._clock.set_state(state["clock"])


def _check_schedules(config: RunConfig, timed: RunConfig) -> None:
  """Raises ValueError unless one run's rounds can be timed as another's."""
  plans = to_plan.run_plan(config), to_plan.run_plan(timed)
  require(
    plans[0] == plans[1],
    "a run is timed as another one only if both have the same steps, method, "
    "H, P and tau",
  )
  require(
    config.adaptive.mode == "off",
    f"adaptive.mode={config.adaptive.mode!r} changes rank and H of the run but "
    "not of the one that is timed in its place: take adaptive.mode=off",
  )
