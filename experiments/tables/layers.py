"""Simulates a step layer by layer, as Table 4 of Streaming DiLoCo does.

Elsewhere in this package a step is one block of compute. That paper (arXiv
2501.18512) divides a step of L layers into 4 L - 1 nodes: every layer has a
forward pass, an activation gradient (except layer 0), a weight gradient and a
reduction. So a reduction hides behind the rest of the backward pass, and a
forward pass waits for its own layer only. Compute is serial, and the link
sends one reduction after the other. All bandwidths are simulated at once,
since they differ only in how long a reduction takes.

Closed forms of a step without waits, T seconds, forward share f = 0.2: the
forward pass of layer k starts at k f T / L. The backward pass has 2 L - 1
nodes of (1 - f) T / (2 L - 1) seconds, last layer first, and layer k is done
when the 2 k - 1 nodes of lower layers remain. With L = 2 and T = 1 the forward
passes start at 0 and 0.1; three nodes of 0.267 s follow from 0.2 on; layer 1
is done at 0.733 (two nodes), layer 0 at 1.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule

# Every value of Table 4 is on this grid, rounded to two decimals of a Gbit/s
# and then to one.
GRID_BPS = np.logspace(-1, 3, 50) * 1e9
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)  # Compute utilization of its columns.

Bandwidths = Float[np.ndarray, " bandwidths"]


# Number of rounds of H steps that are simulated, fitted on Table 4. Nothing
# waits for the transfers of the last round, so 5 of 6 count. With 5 or 7 rounds
# the fit is worse.
NUM_ROUNDS = 6


@dataclasses.dataclass(frozen=True)
class LayerModel:
  """A model of equal layers, as the table describes it.

  Attributes:
    num_parameters: Number of parameters, spread evenly over the layers.
    num_layers: L.
    step_s: Duration of the compute of one inner step (seconds).
    forward_share: Share of a step's compute that is the forward pass. The paper
      does not state it; it is fitted on Table 4. Values of 0.19 to 0.21 give as
      many exact cells.
  """

  num_parameters: float
  num_layers: int
  step_s: float
  forward_share: float = 0.20


@dataclasses.dataclass(frozen=True)
class LayerMethod:
  """Which layers are sent when, and with how many bits.

  Attributes:
    schedule: Schedule of the plan. With more than one fragment, fragment 0
      holds no layer, and sending it takes no time here.
    bits: Bits of a parameter on the wire.
  """

  schedule: SyncSchedule
  bits: float | int = 16


@dataclasses.dataclass(frozen=True)
class LayerRun:
  """Result of a simulation.

  Attributes:
    compute_s: Duration of all compute, [] (seconds).
    ends_s: End of each step's compute, [steps, bandwidths] (seconds).
  """

  compute_s: float
  ends_s: Float[np.ndarray, "steps bandwidths"]

  @property
  def utilization(self) -> Bandwidths:
    """Compute over elapsed time, 0 to 1."""
    return self.compute_s / self.ends_s[-1]


def table_methods(num_layers: int) -> dict[str, LayerMethod]:
  """Returns the methods of the five rows of Table 4, with H = 100.

  Args:
    num_layers: L, which gives the number of fragments, of three layers each.
  """
  num_fragments = 1 + num_layers // 3
  overlapped = SyncSchedule(100, num_fragments, overlap_steps=1)
  return {
    "Data-Parallel": LayerMethod(SyncSchedule(1)),
    "DiLoCo": LayerMethod(SyncSchedule(100)),
    "Streaming": LayerMethod(SyncSchedule(100, num_fragments)),
    "Streaming + overlap": LayerMethod(overlapped),
    "Streaming + overlap, FP4": LayerMethod(overlapped, bits=4),
  }


def sends(
  method: LayerMethod, num_layers: int, num_steps: int
) -> dict[int, list[int]]:
  """Returns the layers that are sent after each inner step.

  The events are those of the plan with one difference: a fragment is first sent
  after H steps, while the plan sends it at its first offset. The table agrees
  better with this (63 exact cells against 50).

  Args:
    method: Method with its schedule.
    num_layers: L.
    num_steps: Number of inner steps that are simulated.

  Returns:
    Layers by inner step, in the order in which their gradients are ready: the
    last layer first.
  """
  schedule = method.schedule
  layers_by_step: dict[int, list[int]] = {}
  fragments = Fragments(schedule.num_fragments, num_layers)
  for event in schedule.events(0, num_steps):
    if event.kind != "send" or event.step < schedule.sync_interval:
      continue
    layers = list(range(num_layers))
    if fragments.num_fragments > 1:
      layers = fragments.layers(event.fragment).tolist()
    layers += layers_by_step.get(event.step, [])
    layers_by_step[event.step] = sorted(layers, reverse=True)
  return layers_by_step


def simulate_layers(
  model: LayerModel,
  method: LayerMethod,
  bandwidth_bps: Sequence[float] | Bandwidths,
) -> LayerRun:
  """Simulates `NUM_ROUNDS` rounds at every bandwidth.

  Args:
    model: Model that is trained.
    method: Schedule and bits of what is sent.
    bandwidth_bps: Bandwidths of the link (bit/s), [bandwidths]; infinity is
      allowed.
  """
  bandwidth = np.asarray(bandwidth_bps, np.float64)
  layer_bits = model.num_parameters * method.bits / model.num_layers
  num_steps = NUM_ROUNDS * method.schedule.sync_interval
  layers_by_step = sends(method, model.num_layers, num_steps)
  starts, stops = _node_times(model)
  # Ends of the compute and of the transfers so far [bandwidths].
  now = np.zeros_like(bandwidth)
  link = np.zeros_like(bandwidth)
  ends = np.empty((num_steps, *bandwidth.shape))
  arrivals: dict[int, dict[int, Bandwidths]] = {}
  for step in range(1, num_steps + 1):
    for layer, arrival in sorted(arrivals.pop(step, {}).items()):
      # The forward pass of this layer cannot start before its arrival, so `now`
      # is shifted such that the pass starts at now + starts[layer].
      now = np.maximum(now, arrival - starts[layer])
    due = arrivals.setdefault(step + 1 + method.schedule.overlap_steps, {})
    for layer in layers_by_step.get(step, ()):
      link = np.maximum(link, now + stops[layer]) + layer_bits / bandwidth
      due[layer] = link
    now = now + model.step_s
    ends[step - 1] = now
  return LayerRun(num_steps * model.step_s, ends)


def _node_times(model: LayerModel):
  """Returns the times of the nodes of a step without waits (seconds).

  Args:
    model: Model that is trained.

  Returns:
    Starts of the forward passes [L] and ends of the weight gradients [L].
  """
  layers = np.arange(model.num_layers)
  forward_s = model.forward_share * model.step_s
  # Layer 0 has no activation gradient.
  node_s = (model.step_s - forward_s) / (2 * model.num_layers - 1)
  starts = layers * (forward_s / model.num_layers)
  stops = model.step_s - node_s * np.maximum(2 * layers - 1, 0)
  return starts, stops


def needed_bandwidth_bps(
  model: LayerModel, method: LayerMethod
) -> Float[np.ndarray, " targets"]:
  """Finds the first bandwidth of `GRID_BPS` that reaches each of `TARGETS`.

  Args:
    model: Model that is trained.
    method: Schedule and bits of what is sent.

  Returns:
    [targets] (bit/s). The last bandwidth of the grid reaches all targets.
  """
  run = simulate_layers(model, method, GRID_BPS)
  return GRID_BPS[(run.utilization[:, None] >= TARGETS).argmax(0)]


def grid_index(bandwidth_bps: float) -> int:
  """Returns the index in `GRID_BPS` of a bandwidth printed to one decimal."""
  return int(np.argmin(np.abs(np.log(GRID_BPS / bandwidth_bps))))
