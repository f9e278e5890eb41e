"""Combines a run's config with a cluster, so that a run can be simulated.

The simulator knows plans but not configs, and a config knows nothing of
clusters. This module combines the two for `estimate`, for
`experiments.simulate` and for the simulated clock of `experiments.train`.
"""

import dataclasses
import hashlib
import math
from typing import Any

import numpy as np

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.checks import check_limits, limited, require
from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.config.device_memory import chosen_gather, optimizer_copies
from dilocox_jax.config.inner_bytes import inner_bytes
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
  """Settings of a simulation that neither cluster nor config have.

  Attributes:
    step_s: Duration of an inner step (seconds). None means that it is computed
      from the operations of the step.
    codec_s: Time in which devices encode and decode one exchange (seconds).
    transport: Library of collectives: "nccl" (GPUs), "tpu" or "gloo" (CPUs).
      Messages of a mailbox (`exchange.collective`) do not use it.
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
    link_costs: Costs of messages on the links of the cluster.
    bubble_fraction: Share of a step in which a pipeline stage is idle; NaN if
      the duration of a step is given and the pipeline has several stages.
    work: Time of a step and of encoding for every replica (seconds).
    script: Turns segments of the plan into the operations of every replica.
    plan: Plan of the run.
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
  """Combines a config with a cluster.

  Args:
    config: Config of the run.
    cluster: The cluster (`cluster_of`).
    options: Settings that config and cluster do not have.

  Raises:
    ValueError: One line that says what does not fit.
  """
  num_replicas = config.mesh.num_replicas
  step_s, bubble_fraction = _step_times(config, cluster, options)
  # A replica that copies the state of another replica gets the parameters and
  # the state of the inner optimizer.
  num_parameters = sum(
    math.prod(shape) for shape in config.trained_shapes.values()
  )
  parameter_bytes = _FP32_BYTES * (1 + optimizer_copies(config))
  copied_bytes = round(parameter_bytes * num_parameters)
  return Setup(
    link_costs=LinkCosts(cluster, TRANSPORTS[options.transport]),
    bubble_fraction=bubble_fraction,
    work=Work(step_s, np.full(num_replicas, options.codec_s)),
    script=Script(to_plan.traffic(config), copied_bytes),
    plan=to_plan.run_plan(config),
  )


def _step_times(
  config: RunConfig, cluster: Cluster, options: Options
) -> tuple[np.ndarray, float]:
  """Returns how long an inner step of each replica takes (seconds, [M]).

  The second result is the bubble fraction, as in `Setup`.

  Args:
    config: Config of the run.
    cluster: The cluster.
    options: As in `set_up`.
  """
  has_stages = config.mesh.num_stages > 1
  if options.step_s is not None:
    # A given duration includes the time in which the pipeline waits.
    bubble_fraction = math.nan if has_stages else 0.0
    return stated_seconds(cluster, options.step_s), bubble_fraction
  pipeline = None
  num_micro_batches = 1
  if has_stages:
    pipeline = config.pipeline
    num_micro_batches = pipeline.num_micro_batches
  shape = config.model.shape
  tokens = config.tokens_per_replica_step
  step_flops = tokens * flops_per_token(shape, config.data.sequence_length)
  # If the config leaves the dtype to the devices, accelerators take bfloat16.
  value_bytes = 4 if config.model.compute_dtype == "float32" else 2
  hop_bytes = value_bytes * shape.model_dim * tokens / num_micro_batches
  # A config without a mesh does not say how many devices a replica has. None
  # means all devices that the cluster gives to a replica.
  num_devices = None
  if config.mesh.layout == "mesh":
    num_devices = config.division.num_devices
  gather = chosen_gather(config, least_memory(cluster))
  return step_seconds(
    cluster,
    step_flops,
    pipeline,
    hop_bytes=hop_bytes,
    num_used=num_devices,
    inner_bytes=inner_bytes(config, gather, value_bytes),
  )


def least_memory(cluster: Cluster) -> float:
  """Returns the memory of a cluster's smallest device (bytes).

  Args:
    cluster: The cluster.

  Returns:
    The number of bytes; infinity if the cluster does not state it.
  """
  known = (site.memory_bytes for site in cluster.sites if site.memory_bytes)
  return min(known, default=math.inf)


class ClusterClock:
  """Adds up the simulated time of the segments that the trainer runs.

  Attributes:
    description: Name of the cluster for reports, e.g. "cluster 1gbit". If the
      time of another run is simulated, also the size of its model.
    digest: 12 hex digits of a digest of the cluster and of all durations.
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
      timed: Config of another run with the same schedule, usually with a larger
        model. The clock then shows the time that the other run would take. None
        means the run itself.

    Raises:
      ValueError: If the config does not fit the cluster or the options, or if
        `timed` has another schedule than the run. The message has one line.
    """
    self._timed_traffic = None
    if timed:
      _check_schedules(config, timed)
      self._timed_traffic = to_plan.traffic(timed)
    timed_config = timed or config
    timed_cluster = cluster_of(timed_config, cluster)
    setup = set_up(timed_config, timed_cluster, options)
    self._copied_bytes = setup.script.copied_bytes
    self._clock = AnalyticClock(setup.link_costs, setup.work)
    # The name includes the duration of a step, because the duration depends on
    # the number of pipeline stages, which neither cluster nor options have.
    step_s = setup.work.step_s.tolist()
    self._name = f"{setup.link_costs.cluster} {options} {step_s}"
    self.description = f"cluster {setup.link_costs.cluster.name}"
    if timed:
      self._name += f" {timed.model.shape}"
      billions = parameter_count(timed.model.shape) / 1e9
      self.description += f", for a model of {billions:.3g} B parameters"
    self.digest = hashlib.sha256(self._name.encode()).hexdigest()[:12]
    self._requested_cluster = cluster

  def advance(self, segment: Segment, traffic: Traffic) -> float:
    """Adds the time of a segment and returns seconds since the run's start.

    Args:
      segment: The segment, as in `Clock.advance`.
      traffic: Counts the bytes of the exchanges. It is not read if the time of
        another run is simulated.
    """
    script = Script(self._timed_traffic or traffic, self._copied_bytes)
    return self._clock.walk(script.segment(segment)).now_s

  def finish(self, plan: RunPlan, traffic: Traffic) -> float:
    """Adds the time of the flush and returns seconds since the run's start.

    Args:
      plan: Plan of the run, as in `Clock.finish`.
      traffic: Counts the bytes of the exchanges, as in `advance`.
    """
    script = Script(self._timed_traffic or traffic)
    return self._clock.walk(script.flush(plan)).now_s

  def get_state(self) -> dict[str, Any]:
    """Returns the state of the clock for a checkpoint, as JSON values.

    Returns:
      A dictionary. "cluster" is a text of the cluster and of all durations,
      which `set_state` compares. "clock" has the times so far.
    """
    return {"cluster": self._name, "clock": self._clock.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    """Sets the clock to a state that `get_state` returned.

    Args:
      state: The state, as JSON values.

    Raises:
      ValueError: If the state belongs to another cluster or another duration of
        a step.
    """
    if state["cluster"] != self._name:
      raise ValueError(
        f"--cluster={self._requested_cluster} or --step_s is not the one with "
        "which the run began: give the old flags again, or take another "
        "--workdir"
      )
    self._clock.set_state(state["clock"])


def _check_schedules(config: RunConfig, timed: RunConfig) -> None:
  """Raises ValueError unless the time of another run can be simulated.

  Args:
    config: Config of the run.
    timed: Config of the other run.
  """
  require(
    to_plan.run_plan(config) == to_plan.run_plan(timed),
    "a run is timed as another one only if both have the same steps, method, "
    "H, P and tau",
  )
  require(
    config.adaptive.mode == "off",
    f"adaptive.mode={config.adaptive.mode!r} changes rank and H of the run but "
    "not of the one that is timed in its place: take adaptive.mode=off",
  )
