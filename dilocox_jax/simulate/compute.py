"""How long an inner step takes, without communication between sites.

A step takes its operations divided by what the devices achieve. Pipeline
stages make it longer by the bubble, which is computed from the same lists of
ticks that a pipelined step executes.
"""

import numpy as np

from dilocox_jax.plan.pipeline.timeline import Pipeline, TickTimes, timeline
from dilocox_jax.simulate.cluster import Cluster


def stated_seconds(cluster: Cluster, step_s: float | int) -> np.ndarray:
  """Returns step times from a known duration; slow sites take longer.

  Args:
    cluster: Sites and their speeds.
    step_s: Duration of a step at speed 1 (seconds).

  Returns:
    Duration of one step for each replica, [M] (seconds).
  """
  replicas = range(cluster.num_replicas)
  return step_s / np.array([cluster.site(r).speed for r in replicas])


def step_seconds(
  cluster: Cluster,
  step_flops: float | int,
  pipeline: Pipeline | None = None,
  hop_bytes: float = 0.0,
  num_used: int | None = None,
) -> tuple[np.ndarray, float]:
  """Computes step times from operations.

  Every stage has an equal share of the work. A backward pass costs twice as
  much as a forward pass, so of every 3 seconds 1 is forward. Activations are
  sent at the rate inside the site, while the next micro-batch is computed.

  Args:
    cluster: Sites and their devices.
    step_flops: Operations of one replica's step (FLOP).
    pipeline: Pipeline inside a replica; None: no stages, no bubble.
    hop_bytes: Bytes of activations that a micro-batch sends between stages.
    num_used: Devices of a replica that compute, the others being idle; None:
      all of them.

  Returns:
    Duration of one step for each replica, [M] (seconds), and the share of a
    step in which a stage has nothing to do.

  Raises:
    ValueError: If a replica has fewer devices than stages.
  """
  replicas = range(cluster.num_replicas)
  shares = [(num_used or n) / n for n in map(cluster.num_devices, replicas)]
  busy_s = [
    step_flops / cluster.replica_flops(r) / min(share, 1.0)
    for r, share in zip(replicas, shares, strict=True)
  ]
  if pipeline is None:
    return np.array(busy_s), 0.0
  lines = []
  for replica, seconds in zip(replicas, busy_s, strict=True):
    devices = cluster.num_devices(replica)
    if devices < pipeline.num_stages:
      raise ValueError(
        f"num_stages={pipeline.num_stages} must be at most the {devices} "
        f"devices of a replica at site {cluster.site(replica).name!r}"
      )
    micro_batch_s = seconds / pipeline.num_micro_batches
    hop_s = 8 * hop_bytes / cluster.site(replica).intra_bps
    times = TickTimes(micro_batch_s / 3, 2 * micro_batch_s / 3, hop_s=hop_s)
    lines.append(timeline(pipeline, times))
  bubbles = [line.bubble_fraction for line in lines]
  return np.array([line.step_s for line in lines]), float(np.mean(bubbles))
