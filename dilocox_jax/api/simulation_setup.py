"""Makes the inputs of the simulator from the config of a run and a cluster."""

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
  """Settings of a simulation that are neither in the cluster nor in the config.

  Attributes:
    step_s: Duration of an inner step (seconds). None: it is computed from the
      operations of the step and the speed of the devices.
    codec_s: Time that devices take to encode and decode one exchange (seconds).
    transport: Protocol of the collectives: "nccl" (GPUs), "tpu" or "gloo"
      (CPUs). Messages through a mailbox do not use it.
  """

  step_s: float | None = limited(None, above=0, below=math.inf)
  codec_s: float = limited(0.0, at_least=0, below=math.inf)
  transport: str = limited("nccl", choices=TRANSPORTS)

  def __post_init__(self):
    check_limits(self)


@dataclasses.dataclass(frozen=True)
class Setup:
  """A run on a cluster, ready to be timed.

  Attributes:
    link_costs: Computes how long messages take on the links of the cluster.
    bubble_fraction: Share of a step in which a pipeline stage is idle (0 to 1);
      NaN if the duration of a step is given and there are several stages.
    work: Durations of a step and of a codec's work for every replica (seconds).
    script: Turns segments of the plan, such as rounds, into inner steps,
      exchanges and waits of every replica.
    plan: Plan of the run: its rounds, and steps outside of rounds.
  """

  link_costs: LinkCosts
  bubble_fraction: float
  work: Work
  script: Script
  plan: RunPlan


def cluster_of(config: RunConfig, name: str) -> Cluster:
  """Loads a cluster with as many replicas as a run has.

  A preset of equal sites gets one site for each replica of the run.

  Args:
    config: Config of the run. Only its number of replicas is read.
    name: Name of a cluster preset, or path of a cluster file.

  Raises:
    ValueError: One line, if there is no such cluster, or if it has another
      number of replicas than the run.
  """
  return load_cluster(name, config.mesh.num_replicas)


def set_up(config: RunConfig, cluster: Cluster, options: Options) -> Setup:
  """Makes what the simulator needs to time a run on a cluster.

  Raises:
    ValueError: If the run does not fit on the cluster. The message is one line.
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
  """Returns each replica's seconds of an inner step, and a stage's idle share.

  `Setup.bubble_fraction` is this share.
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
  # What a pipeline stage sends to the next one for a micro-batch.
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

  Sites (places with devices) that do not state it do not count; infinity if
  none states it.
  """
  known = (site.memory_bytes for site in cluster.sites if site.memory_bytes)
  return min(known, default=math.inf)


class ClusterClock:
  """Adds up the simulated time of a run, segment by segment.

  A segment is a part of the run that the trainer starts as a whole, such as a
  round.

  Attributes:
    description: Name of the cluster for reports, e.g. "cluster 1gbit". If the
      argument `timed` was given, also the size of the model that is timed.
    digest: Hash of what the times depend on besides the config, 12 hexadecimal
      digits: cluster, options and step durations. If the argument `timed` was
      given, also the shape of the model that is timed.
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
      options: Settings that are neither in the config nor in the cluster.
      timed: Config of another run, which is timed in place of this run. It has
        the same schedule, and usually a larger model. None: this run is timed.

    Raises:
      ValueError: One line, if the cluster is unknown, if the run does not fit
        on it, or if `timed` has another schedule or `config` adapts its rank.
    """
    self._timed_traffic = None
    if timed:
      _check_schedules(config, timed)
      self._timed_traffic = to_plan.traffic(timed)
    timed_config = timed or config
    timed_cluster = cluster_of(timed_config, cluster)
    setup = set_up(timed_config, timed_cluster, options)
    # Bytes that a replica receives if it copies the state of another replica.
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
    """Adds the time of a segment, and returns the seconds since the start.

    `traffic` computes the bytes of exchanges. It is not read if the clock times
    another run in place of this one (the argument `timed` of the class).
    """
    script = Script(self._timed_traffic or traffic, self._copied_bytes)
    return self._clock.walk(script.segment(segment)).now_s

  def finish(self, plan: RunPlan, traffic: Traffic) -> float:
    """Adds the time of exchanges that are still due; returns the total (s).

    `traffic` computes the bytes of exchanges. It is not read if the clock times
    another run in place of this one (the argument `timed` of the class).
    """
    script = Script(self._timed_traffic or traffic)
    return self._clock.walk(script.flush(plan)).now_s

  def get_state(self) -> dict[str, Any]:
    """Returns the state of the clock for a checkpoint, as values of JSON."""
    return {"cluster": self._name, "clock": self._clock.get_state()}

  def set_state(self, state: dict[str, Any]) -> None:
    """Restores a state that `get_state` returned.

    Raises:
      ValueError: If the state belongs to a clock with another `digest`.
    """
    if state["cluster"] != self._name:
      raise ValueError(
        f"--cluster={self._requested_cluster} or --step_s is not the one with "
        "which the run began: give the old flags again, or take another "
        "--workdir"
      )
    self._clock.set_state(state["clock"])


def _check_schedules(config: RunConfig, timed: RunConfig) -> None:
  """Raises ValueError if a run cannot show the simulated time of `timed`.

  Their plans must be equal, and the run must not adapt its rank.
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
