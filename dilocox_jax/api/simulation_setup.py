"""Joins a run's config with a cluster, so that the simulator can price it.

The simulator knows plans but no configs, and a config knows no clusters. They
meet here, for `estimate`, `experiments.simulate` and the simulated clock of
`experiments.train`.
"""

import dataclasses
import hashlib
import math
from typing import Any

import numpy as np

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.api.device_memory import optimizer_copies
from dilocox_jax.checks import check_limits, limited, require
from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.plan.model.shapes import flops_per_token, parameter_count
from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment
from dilocox_jax.simulate.analytic import AnalyticClock, Work
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.cluster_file import load_cluster
from dilocox_jax.simulate.gloo import GLOO
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.script import Script
from dilocox_jax.simulate.steps import stated_seconds, step_seconds
from dilocox_jax.simulate.transfer import NCCL, TPU

TRANSPORTS = {"nccl": NCCL, "tpu": TPU, "gloo": GLOO}
_FP32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Options:
  """What a cluster and a config leave open.

  Attributes:
    step_s: Duration of an inner step (seconds); None: from its operations.
    codec_s: Seconds that devices encode and decode one exchange.
    transport: "nccl" (GPUs), "tpu" or "gloo" (CPUs), for what does not go
      through a store by the config (`exchange.collective`).
  """

  step_s: float | None = limited(None, above=0, below=math.inf)
  codec_s: float = limited(0.0, at_least=0, below=math.inf)
  transport: str = "nccl"

  def __post_init__(self):
    check_limits(self)


@dataclasses.dataclass(frozen=True)
class Setup:
  """A run on a cluster, ready to be timed.

  Attributes:
    link_costs: Cluster and transport.
    bubble_fraction: Share of a step in which a stage has nothing to do; NaN if
      steps are stated and have stages.
    work: Seconds of a replica's own work.
    script: Turns segments into the ops of every replica.
    plan: Segments of the run.
  """

  link_costs: LinkCosts
  bubble_fraction: float
  work: Work
  script: Script
  plan: RunPlan


def cluster_of(config: RunConfig, name: str) -> Cluster:
  """Returns the cluster on which the replicas of a run are placed.

  Args:
    config: Config of the run, which has the number of replicas.
    name: Name of a cluster preset, or path of a cluster file.

  Raises:
    ValueError: One line, if there is no such cluster, or it is too small.
  """
  return load_cluster(name, config.mesh.num_replicas)


def set_up(config: RunConfig, cluster: Cluster, options: Options) -> Setup:
  """Joins a config with a cluster.

  Args:
    config: Config of the run.
    cluster: The cluster (`cluster_of`).
    options: What config and cluster leave open.

  Raises:
    ValueError: One line that says what does not fit.
  """
  num_replicas = config.mesh.num_replicas
  step_s, bubble_fraction = _steps(config, cluster, options)
  # A replica that copies another one gets its inner optimizer's state too.
  copies = _FP32_BYTES * (1 + optimizer_copies(config))
  count = sum(map(math.prod, config.trained_shapes.values()))
  copied_bytes = round(copies * count)
  script = Script(to_plan.traffic(config), copied_bytes)
  return Setup(
    LinkCosts(cluster, TRANSPORTS[options.transport]),
    bubble_fraction,
    Work(step_s, np.full(num_replicas, options.codec_s)),
    script,
    to_plan.run_plan(config),
  )


def _steps(
  config: RunConfig, cluster: Cluster, options: Options
) -> tuple[np.ndarray, float]:
  if options.step_s is not None:
    # A stated step includes whatever its pipeline waits.
    bubble = math.nan if config.mesh.num_stages > 1 else 0.0
    return stated_seconds(cluster, options.step_s), bubble
  pipeline = config.pipeline if config.mesh.num_stages > 1 else None
  shape = config.model.shape
  tokens = config.tokens_per_replica_step
  step_flops = tokens * flops_per_token(shape, config.data.sequence_length)
  micro_batches = pipeline.num_micro_batches if pipeline else 1
  # Devices that may choose compute in bfloat16, if they are accelerators.
  value_bytes = 4 if config.model.compute_dtype == "float32" else 2
  hop_bytes = value_bytes * shape.model_dim * tokens / micro_batches
  # A config that says nothing of devices is meant to use them all.
  is_mesh = config.mesh.layout == "mesh"
  num_used = config.division.num_devices if is_mesh else None
  return step_seconds(cluster, step_flops, pipeline, hop_bytes, num_used)


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
    timed = timed or config
    setup = set_up(timed, cluster_of(timed, cluster), options)
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
      ValueError: If the state belongs to another cluster or another duration of
        a step.
    """
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
