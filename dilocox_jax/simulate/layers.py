"""Utilisation layer by layer, as Streaming DiLoCo's Table 4 counts it.

The closed forms see a step as one block of compute. That paper sees the nodes
of a step of L layers (its count, 4 L - 1): a forward, an activation gradient
(but for layer 0), a weight gradient and a reduction each. A reduction thus
hides behind the rest of the backward pass, and a forward waits for its own
layer alone, which is what the table (arXiv 2501.18512) measures. Compute is
serial, the link first in, first out. All bandwidths are simulated at once,
since they differ in nothing but the length of a reduction.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule

# Every value of Table 4 lies on this grid, rounded to two decimals of a
# Gbit/s and then to one.
GRID_BPS = np.logspace(-1, 3, 50) * 1e9
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)  # Compute utilisation of its columns.

Bandwidths = Float[np.ndarray, " bandwidths"]


@dataclasses.dataclass(frozen=True)
class TableConstants:
  """What the paper leaves out, fitted on Table 4: two numbers for 75 cells.

  Attributes:
    forward_share: Part of a step's compute that is forward; 0.19 to 0.21
      give as many exact cells.
    num_rounds: Rounds of H steps simulated. Transfers of the last one are not
      waited for, so that 5 of 6 count; 5 and 7 fit worse.
  """

  forward_share: float | int = 0.20
  num_rounds: int = 6

  def __post_init__(self):
    if not 0 < self.forward_share < 1:
      raise ValueError(
        f"forward_share={self.forward_share} must lie between 0 and 1"
      )
    if self.num_rounds < 1:
      raise ValueError(f"num_rounds={self.num_rounds} must be at least 1")


@dataclasses.dataclass(frozen=True)
class LayerModel:
  """A model as the table describes it: equal layers and nothing else.

  Attributes:
    num_parameters: All that is exchanged, spread evenly over the layers.
    num_layers: L.
    step_s: Compute of one inner step.
  """

  num_parameters: float | int
  num_layers: int
  step_s: float | int

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not 0 < value < float("inf"):
        raise ValueError(f"{field.name}={value} must be positive")


@dataclasses.dataclass(frozen=True)
class LayerMethod:
  """Which layers travel when, and how long a parameter is on the wire.

  Attributes:
    schedule: The plan's; with more than one fragment, fragment 0 holds what
      is no layer, so that nothing of it is sent here.
    bits: Of a parameter on the wire.
    order: "strided" or "sequential" fragments.
  """

  schedule: SyncSchedule
  bits: float | int = 16
  order: str = "strided"

  def layers(self, fragment: int, num_layers: int) -> list[int]:
    """The layers of a fragment in the order the backward pass ends them."""
    parts = self.schedule.num_fragments
    if parts == 1:
      return list(range(num_layers))[::-1]
    if fragment == 0:
      return []
    return (
      Fragments(parts, num_layers, self.order).layers(fragment)[::-1].tolist()
    )


@dataclasses.dataclass(frozen=True)
class LayerRun:
  """What came of a simulation.

  Attributes:
    compute_s: All compute, [] (seconds).
    ends_s: End of each step's compute, [steps, bandwidths] (seconds).
    link_s: End of the last reduction, [bandwidths] (seconds).
    sent_bits: Put on the link, []; the same at every bandwidth.
  """

  compute_s: float
  ends_s: Float[np.ndarray, "steps bandwidths"]
  link_s: Bandwidths
  sent_bits: float

  @property
  def utilisation(self) -> Bandwidths:
    """Compute over elapsed time, 0 to 1."""
    return self.compute_s / self.ends_s[-1]

  def steady_step_s(self, num_steps: int) -> Bandwidths:
    """Mean duration of the last `num_steps` steps, waits included."""
    return (self.ends_s[-1] - self.ends_s[-1 - num_steps]) / num_steps


def table_methods(
  num_layers: int, sync_interval: int = 100, layers_per_fragment: int = 3
) -> dict[str, LayerMethod]:
  """The five rows of Table 4.

  Args:
    num_layers: L, on which the number of fragments depends.
    sync_interval: H.
    layers_per_fragment: 3 at every scale.
  """
  parts = 1 + num_layers // layers_per_fragment

  def streaming(overlap_steps: int) -> SyncSchedule:
    return SyncSchedule(sync_interval, parts, overlap_steps)

  return {
    "Data-Parallel": LayerMethod(SyncSchedule(1)),
    "DiLoCo": LayerMethod(SyncSchedule(sync_interval)),
    "Streaming": LayerMethod(streaming(0)),
    "Streaming + overlap": LayerMethod(streaming(1)),
    "Streaming + overlap, FP4": LayerMethod(streaming(1), bits=4),
  }


def sends(
  method: LayerMethod, num_layers: int, num_steps: int
) -> dict[int, list[int]]:
  """Layers sent after each inner step, in the order they become ready.

  The events are the plan's but for one thing, which the table decides (63
  exact cells against 50): a fragment is first sent once it has done H steps,
  where the plan sends it at its first phase.

  Args:
    method: Whose schedule.
    num_layers: L.
    num_steps: Inner steps simulated.
  """
  sent: dict[int, list[int]] = {}
  for event in method.schedule.events(0, num_steps):
    if event.kind == "send" and event.step >= method.schedule.sync_interval:
      layers = method.layers(event.fragment, num_layers)
      sent[event.step] = sorted(sent.get(event.step, []) + layers)[::-1]
  return sent


def simulate_layers(
  model: LayerModel,
  method: LayerMethod,
  bandwidth_bps: Sequence[float] | Bandwidths,
  constants: TableConstants | None = None,
) -> LayerRun:
  """Simulates `num_rounds` rounds at every bandwidth.

  Args:
    model: What is trained.
    method: What is sent when.
    bandwidth_bps: Of the link, [bandwidths]; infinity is allowed.
    constants: Of the table, if None.

  Raises:
    ValueError: A bandwidth is not positive.
  """
  constants = constants or TableConstants()
  bandwidth = np.asarray(bandwidth_bps, np.float64)
  if not (bandwidth > 0).all():
    raise ValueError(f"bandwidth_bps={bandwidth.min()} must be positive")
  count = model.num_layers
  layer_bits = model.num_parameters * method.bits / count
  num_steps = constants.num_rounds * method.schedule.sync_interval
  sent = sends(method, count, num_steps)
  starts, stops = _node_times(model, constants.forward_share)
  now, link = np.zeros_like(bandwidth), np.zeros_like(bandwidth)
  ends = np.empty((num_steps, *bandwidth.shape))
  arrivals: dict[int, dict[int, Bandwidths]] = {}
  for step in range(1, num_steps + 1):
    for layer, arrival in sorted(arrivals.pop(step, {}).items()):
      # `now` is when the step would have begun, had it never waited.
      now = np.maximum(now, arrival - starts[layer])
    due = arrivals.setdefault(step + 1 + method.schedule.overlap_steps, {})
    for layer in sent.get(step, ()):
      link = np.maximum(link, now + stops[layer]) + layer_bits / bandwidth
      due[layer] = link
    now = now + model.step_s
    ends[step - 1] = now
  reductions = sum(len(layers) for layers in sent.values())
  return LayerRun(num_steps * model.step_s, ends, link, reductions * layer_bits)


def _node_times(model: LayerModel, forward_share: float):
  """Begin of each forward and end of each weight gradient in a free step."""
  layers = np.arange(model.num_layers)
  forward_s = forward_share * model.step_s
  # Layer 0 has no activation gradient.
  node_s = (model.step_s - forward_s) / (2 * model.num_layers - 1)
  starts = layers * (forward_s / model.num_layers)
  stops = model.step_s - node_s * np.maximum(2 * layers - 1, 0)
  return starts, stops


def needed_bandwidth_bps(
  model: LayerModel,
  method: LayerMethod,
  targets: Sequence[float] = TARGETS,
  constants: TableConstants | None = None,
  grid_bps: Sequence[float] | Bandwidths = GRID_BPS,
) -> Float[np.ndarray, " targets"]:
  """The first bandwidth of a grid that reaches each utilisation.

  Args:
    model: What is trained.
    method: What is sent when.
    targets: Utilisations, [targets].
    constants: Of the table, if None.
    grid_bps: Ascending; the table's by default.

  Returns:
    [targets] (bit/s), infinity where no bandwidth of the grid suffices.
  """
  grid = np.asarray(grid_bps, np.float64)
  reached = (
    simulate_layers(model, method, grid, constants).utilisation[:, None]
    >= targets
  )
  return np.where(reached.any(0), grid[reached.argmax(0)], np.inf)


def grid_index(bandwidth_bps: float) -> int:
  """Where in `GRID_BPS` a bandwidth printed to one decimal lies."""
  return int(np.argmin(np.abs(np.log(GRID_BPS / bandwidth_bps))))


# Table 4's models; step times are the paper's (60 % of peak).
TABLE_MODELS: Mapping[str, LayerModel] = {
  "1B": LayerModel(1e9, 24, 0.1),
  "10B": LayerModel(10e9, 48, 0.8),
  "100B": LayerModel(100e9, 108, 4.9),
}
