"""Joins a run's config with a cluster, so that the simulator can price it.

The simulator knows plans but no configs, and a config knows no clusters. They
meet here, for `estimate`, `experiments.simulate` and the simulated clock of
`experiments.train`.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.plan.model.shapes import flops_per_token, parameter_count
from dilocox_jax.plan.pipeline.timeline import Pipeline
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.simulate.compute import Steps, stated_seconds, step_seconds
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.outcome import Work
from dilocox_jax.simulate.presets import cluster_presets, load_cluster
from dilocox_jax.simulate.script import Script
from dilocox_jax.simulate.transfer import IDEAL, TCP

TRANSPORTS = {"tcp": TCP, "ideal": IDEAL}
_STATE_BYTES = 12  # A parameter and AdamW's two moments in fp32.


@dataclasses.dataclass(frozen=True)
class Options:
  """What a cluster and a config leave open.

  Attributes:
    step_s: Duration of an inner step (seconds); None: from its operations.
    codec_s: Seconds that devices encode and decode one exchange.
    transport: "tcp" or "ideal".
    engine_steps: Inner steps for the event engine; 0: six rounds.
    pipeline: Name of a schedule; "none": that of the run, if it has stages.
    num_stages: Stages of the pipeline.
    num_micro_batches: Micro-batches of a step.
    chunks_per_stage: Chunks of a stage in the interleaved schedule.
  """

  step_s: float | None = None
  codec_s: float = 0.0
  transport: str = "tcp"
  engine_steps: int = 0
  pipeline: str = "none"
  num_stages: int = 1
  num_micro_batches: int = 1
  chunks_per_stage: int = 1

  def __post_init__(self):
    for name in ("step_s", "codec_s"):
      value = getattr(self, name)
      if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"{name}={value} must be seconds, 0 or more")


@dataclasses.dataclass(frozen=True)
class Setup:
  """A run on a cluster, ready for either path.

  Attributes:
    link_costs: Cluster and transport.
    steps: Duration of inner steps.
    work: Seconds of a replica's own work.
    script: Turns segments into the ops of every replica.
    plan: Segments of the run.
  """

  link_costs: LinkCosts
  steps: Steps
  work: Work
  script: Script
  plan: RunPlan


def preset_lines() -> Iterator[str]:
  """Yields the name of every preset with a line about it."""
  for name, values in cluster_presets().items():
    yield f"{name:22} {values['description']}"


def set_up(config: RunConfig, cluster_name: str, options: Options) -> Setup:
  """Joins a config with a cluster.

  Args:
    config: Config of the run.
    cluster_name: Name of a preset, or path of a file.
    options: What config and cluster leave open.

  Raises:
    ValueError: One line that says what does not fit.
  """
  num_replicas = config.mesh.num_replicas
  cluster = load_cluster(cluster_name, num_replicas)
  steps = _steps(config, cluster, options)
  script = Script(
    to_plan.traffic(config),
    parameter_count(config.model.shape) * _STATE_BYTES,
  )
  return Setup(
    LinkCosts(cluster, TRANSPORTS[options.transport]),
    steps,
    Work(steps.seconds, np.full(num_replicas, options.codec_s)),
    script,
    to_plan.run_plan(config),
  )


def _steps(config: RunConfig, cluster, options: Options) -> Steps:
  if options.step_s is not None:
    return stated_seconds(cluster, options.step_s)
  pipeline = _pipeline(config, options)
  shape = config.model.shape
  tokens = config.tokens_per_replica_step
  step_flops = tokens * flops_per_token(shape, config.data.sequence_length)
  bf16_bytes = 2
  micro_batches = pipeline.num_micro_batches if pipeline else 1
  hop_bytes = bf16_bytes * tokens * shape.model_dim / micro_batches
  return step_seconds(cluster, step_flops, pipeline, hop_bytes)


def _pipeline(config: RunConfig, options: Options) -> Pipeline | None:
  """Returns the pipeline of the options, or else that of the run."""
  if options.pipeline != "none":
    return Pipeline(
      options.pipeline,
      options.num_stages,
      options.num_micro_batches,
      options.chunks_per_stage,
    )
  if options.num_stages > 1:
    raise ValueError(
      f"--stages={options.num_stages} needs --pipeline, e.g. --pipeline=1f1b"
    )
  return config.pipeline if config.mesh.num_stages > 1 else None
