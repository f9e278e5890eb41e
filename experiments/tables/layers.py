"""Simulates a step layer by layer, as Table 4 of Streaming DiLoCo does.

Streaming DiLoCo (arXiv 2501.18512) divides a step of L layers into 4 L - 1
nodes: every layer has a forward pass, an activation gradient (except layer 0),
a weight gradient and a reduction over the link. A reduction hides behind the
compute that follows. Only a later forward pass of the same layer waits for it.
Compute is serial, and so are the reductions.

Let a step that waits for nothing take T seconds, of which the forward pass
takes the share f = 0.2. The forward pass of layer k starts at k f T / L. The
backward pass has 2 L - 1 nodes of (1 - f) T / (2 L - 1) seconds each and begins
with the last layer. The weight gradient of layer k > 0 is ready when only the
2 k - 1 nodes of lower layers remain, and that of layer 0 at T.

Example: L = 2 and T = 1 s. The forward passes start at 0 and 0.1 s. The
backward pass starts at 0.2 s and has three nodes of 0.267 s. The gradient of
layer 1 is ready after two of them, at 0.733 s, and the gradient of layer 0 at
1 s.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule

# Every bandwidth of Table 4 is a value of this grid, rounded to two decimals of
# a Gbit/s and then to one.
GRID_BPS = np.logspace(-1, 3, 50) * 1e9
# Compute utilization of each column of Table 4.
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
# Number of rounds of H steps that are simulated, fitted on Table 4. No step
# waits for the transfers of the last round, so the transfers of 5 of 6 rounds
# count. With 5 or 7 rounds the fit is worse.
NUM_ROUNDS = 6

Bandwidths = Float[np.ndarray, " bandwidths"]


@dataclasses.dataclass(frozen=True)
class LayerModel:
  """A model of equal layers, as Table 4 describes it.

  Attributes:
    num_parameters: Number of parameters, spread evenly over the layers.
    num_layers: Number of layers, L.
    step_s: Duration of the compute of one inner step (seconds).
    forward_share: Share of a step's compute that is the forward pass, fitted on
      Table 4 (0.19 to 0.21 fit equally well).
  """

  num_parameters: float
  num_layers: int
  step_s: float
  forward_share: float = 0.20


@dataclasses.dataclass(frozen=True)
class LayerMethod:
  """When the update of each layer is sent, and with how many bits.

  Attributes:
    schedule: When each fragment (a group of layers) is sent. Of several
      fragments, the first has the weights outside the layers. Sending it takes
      no time, because a `LayerModel` has all its parameters in layers.
    bits: Bits of a parameter on the wire.
  """

  schedule: SyncSchedule
  bits: float | int = 16


@dataclasses.dataclass(frozen=True)
class LayerRun:
  """The times of a simulated run, at several bandwidths of the link.

  Attributes:
    compute_s: Duration of the compute of all steps together (seconds).
    ends_s: Time from the start of the run to the end of each step's compute
      (seconds), [steps, bandwidths].
  """

  compute_s: float
  ends_s: Float[np.ndarray, "steps bandwidths"]

  @property
  def utilization(self) -> Bandwidths:
    """Share of the run's time that is compute, 0 to 1, [bandwidths]."""
    return self.compute_s / self.ends_s[-1]


def table_methods(num_layers: int) -> dict[str, LayerMethod]:
  """Returns the methods of the five rows of Table 4, by name.

  Data-parallel training sends each layer at every step. The other methods send
  each layer once in H = 100 steps. The streaming methods divide the layers
  among num_layers // 3 fragments, and send one fragment at a time. A fragment
  has three layers, or a few more if the number of layers is no multiple of 3.
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
  """Returns the layers that are sent in the backward pass of each inner step.

  A layer is sent when the schedule sends its fragment (a group of layers), but
  never before step H, the end of the first round.

  Returns:
    Layers by inner step (from 1), the last layer first, as their gradients
    become ready. A step that sends no layer is missing or has an empty list.
  """
  schedule = method.schedule
  layers_by_step: dict[int, list[int]] = {}
  fragments = Fragments(schedule.num_fragments, num_layers)
  for event in schedule.events(0, num_steps):
    # With the sends before step H only 50 cells of Table 4 would be
    # exact, instead of 63.
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
  """Simulates six rounds (`NUM_ROUNDS`) of a method at every bandwidth.

  The bandwidths (bit/s) of the link may be infinite.
  """
  bandwidth = np.asarray(bandwidth_bps, np.float64)
  layer_bits = model.num_parameters * method.bits / model.num_layers
  num_steps = NUM_ROUNDS * method.schedule.sync_interval
  layers_by_step = sends(method, model.num_layers, num_steps)
  forward_starts_s, gradient_ends_s = _node_times(model)
  # When the present step starts, and when the last transfer so far ends
  # (seconds), [bandwidths].
  now_s = np.zeros_like(bandwidth)
  link_free_s = np.zeros_like(bandwidth)
  ends_s = np.empty((num_steps, *bandwidth.shape))
  # By inner step and layer, the end of the transfer for which the forward pass
  # of the layer in this step waits.
  arrivals_s: dict[int, dict[int, Bandwidths]] = {}
  for step in range(1, num_steps + 1):
    for layer, arrival_s in sorted(arrivals_s.pop(step, {}).items()):
      # If the forward pass of this layer has to wait, the whole step is moved
      # so that this pass starts at the arrival. In fact lower layers compute
      # earlier, but no other time depends on that.
      now_s = np.maximum(now_s, arrival_s - forward_starts_s[layer])
    # The first step whose forward pass needs what this step sends.
    due_step = step + 1 + method.schedule.overlap_steps
    due_arrivals_s = arrivals_s.setdefault(due_step, {})
    for layer in layers_by_step.get(step, ()):
      send_s = np.maximum(link_free_s, now_s + gradient_ends_s[layer])
      link_free_s = send_s + layer_bits / bandwidth
      due_arrivals_s[layer] = link_free_s
    now_s = now_s + model.step_s
    ends_s[step - 1] = now_s
  return LayerRun(compute_s=num_steps * model.step_s, ends_s=ends_s)


def _node_times(model: LayerModel) -> tuple[np.ndarray, np.ndarray]:
  """Returns starts of forward passes and ends of weight gradients, by layer.

  They are seconds from the start of a step that waits for nothing (formulas: at
  the top of the module).
  """
  layers = np.arange(model.num_layers)
  forward_s = model.forward_share * model.step_s
  # Layer 0 has no activation gradient.
  node_s = (model.step_s - forward_s) / (2 * model.num_layers - 1)
  forward_starts_s = layers * (forward_s / model.num_layers)
  num_nodes_left = np.maximum(2 * layers - 1, 0)
  gradient_ends_s = model.step_s - node_s * num_nodes_left
  return forward_starts_s, gradient_ends_s


def needed_bandwidth_bps(
  model: LayerModel, method: LayerMethod
) -> Float[np.ndarray, " targets"]:
  """Returns the least bandwidth for each compute utilization in `TARGETS`.

  The bandwidths (bit/s) are values of the grid `GRID_BPS`. The largest value of
  the grid must reach all targets; this is not checked.
  """
  run = simulate_layers(model, method, GRID_BPS)
  reaches = run.utilization[:, None] >= TARGETS  # [bandwidths, targets]
  # `argmax` finds the first True, which is the least bandwidth.
  return GRID_BPS[reaches.argmax(axis=0)]


def grid_index(bandwidth_bps: float) -> int:
  """Returns the index of the nearest bandwidth in the grid `GRID_BPS`.

  The nearest bandwidth is the one with the ratio nearest to 1.
  """
  return int(np.argmin(np.abs(np.log(GRID_BPS / bandwidth_bps))))
