"""Plans what training by each method would cost on a cluster, and ranks them.

A plan combines four things:

- a method;
- the model and the batch of a config;
- H, P and a codec whose loss was measured (`api.measured_gaps`), or those of
  the method's recipe if nothing was measured;
- a layout, which divides each replica among its devices: the fastest layout
  that leaves some memory to spare.

Plans are ranked by the loss that they would reach in equal time.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dilocox_jax.api.measured_gaps import (
  MeasuredGap,
  measured_gaps,
  share_of_more_steps,
)
from dilocox_jax.api.simulation_setup import (
  Options,
  Setup,
  cluster_of,
  least_memory,
  set_up,
)
from dilocox_jax.checks import flat, require
from dilocox_jax.codecs.named import link_names
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.config.device_memory import (
  LEAST_SPARE,
  DeviceMemory,
  device_memory,
)
from dilocox_jax.config.run import check_config
from dilocox_jax.plan.choices import REMATS
from dilocox_jax.plan.collectives import MAILBOX
from dilocox_jax.plan.schedule.methods import METHODS
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.steps import SteadyState, steady_state

# Sections whose values belong to a method. A change of the method drops them.
_METHOD_SECTIONS = ("sync", "exchange", "adaptive", "outer")
# Methods that average gradients in every step.
_EVERY_STEP = ("allreduce", "cocktail_sgd")
# Most tensor shards that a plan has. More of them would wait for each other
# over the slower links between machines.
_MOST_TENSOR_SHARDS = 8
# Fields whose product is the number of devices of a replica.
_COUNTS = ("mesh.num_stages", "mesh.num_data_shards", "mesh.num_tensor_shards")
# Width of the model for each rank. The recipe has rank 16 for width 128.
_WIDTH_PER_RANK = 8
# Utilization from which on all transfers count as hidden behind inner steps.
_HIDDEN = 0.999
# Name of the plan that sends gradients of two bytes a value, as most frameworks
# do.
NARROW_ALLREDUCE = "allreduce bf16"
_NARROW: Mapping[str, Any] = {"exchange.codec": "bfloat16"}

# By default everything is derived from config and cluster.
_DERIVED = Options()

# New values of fields of a config, by dotted name.
Changes = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class MethodPlan:
  """One way to train, and what it costs.

  Attributes:
    name: Name of the method, or `NARROW_ALLREDUCE`.
    config: Config of the run.
    setup: The run on the cluster, ready to be timed.
    rounds: Costs of rounds in the middle of a long run (simulated).
    memory: Memory that a device needs (its state derived, the rest estimated).
    device_bytes: Memory that a device has (bytes); infinity if it is not known.
    allreduce_tokens_per_s: Throughput of AllReduce in float32 on the same links
      (tokens per second).
    fastest_tokens_per_s: Throughput of the fastest compared plan (tokens per
      second).
    gap: Measured gap between the loss of these settings and the loss of
      AllReduce. None if it was not measured, and for AllReduce itself.
  """

  name: str
  config: RunConfig
  setup: Setup
  rounds: SteadyState
  memory: DeviceMemory
  device_bytes: float
  allreduce_tokens_per_s: float = math.nan
  fastest_tokens_per_s: float = math.nan
  gap: MeasuredGap | None = None

  @property
  def is_baseline(self) -> bool:
    """Whether this plan is AllReduce, with which gaps compare."""
    return self.name == "allreduce"

  @property
  def is_measured(self) -> bool:
    """Whether the gap to the loss of AllReduce is known."""
    return self.is_baseline or self.gap is not None

  @property
  def gap_at_equal_time(self) -> float:
    """Relative gap to the loss of AllReduce if all plans had equal time.

    AllReduce is taken with as many steps as the fastest plan makes in this
    time. The value adds two gaps: the measured gap at equal steps, and the gap
    of a slower plan, which makes fewer steps in the same time (derived,
    `measured_gaps.share_of_more_steps`). Example: 0.02 is a loss that is 2 %
    higher. NaN if the gap was not measured.
    """
    if not self.is_measured:
      return math.nan
    gap = self.gap.gap if self.gap else 0.0
    ratio = self.tokens_per_s / self.fastest_tokens_per_s
    return (1 + gap) * share_of_more_steps(ratio) - 1

  @property
  def spare(self) -> float:
    """Share of a device's memory that is left, below 0 if it is too small.

    It is 1 if the memory of a device is not known.
    """
    if math.isinf(self.device_bytes):
      return 1.0
    return 1 - self.memory.total / self.device_bytes

  @property
  def has_room(self) -> bool:
    """Whether a device has enough memory to spare to recommend the plan."""
    return self.spare >= LEAST_SPARE

  @property
  def hides(self) -> bool:
    """Whether all transfers hide behind inner steps."""
    return self.rounds.utilization >= _HIDDEN

  @property
  def tokens_per_s(self) -> float:
    """Throughput of all replicas together (tokens per second)."""
    steps_per_s = self.rounds.replica_steps / self.rounds.step_s
    return steps_per_s * self.config.tokens_per_replica_step

  @property
  def speed_up(self) -> float:
    """Ratio of the throughput to that of AllReduce in float32."""
    return self.tokens_per_s / self.allreduce_tokens_per_s

  @property
  def bytes_per_day(self) -> float:
    """Bytes that one replica sends in a day."""
    return self.rounds.sent_bytes / self.rounds.step_s * 86_400

  @property
  def fits(self) -> bool:
    """Whether a device has room; True if its memory is not known."""
    return self.memory.total <= self.device_bytes

  @property
  def reason(self) -> str:
    """Why a device lacks memory for the plan; "" if it has enough to spare."""
    if self.has_room:
      return ""
    needed_gb = self.memory.total / 1e9
    device_gb = self.device_bytes / 1e9
    reason = f"a device needs {needed_gb:.3g} GB and has {device_gb:.3g} GB"
    if self.fits:
      least = f"{100 * LEAST_SPARE:.0f} %"
      reason += f", so less than {least} is left for a wrong estimate"
    return reason


def plan_run(
  config: RunConfig,
  cluster: str,
  options: Options = _DERIVED,
  device_bytes: float | None = None,
) -> MethodPlan:
  """Plans a run with all its settings, and AllReduce on the same mesh.

  Args:
    config: Config of the run.
    cluster: Name of a cluster preset, or path of a cluster file.
    options: What config and cluster leave open.
    device_bytes: Memory of a device (bytes). None takes it from the cluster.

  Returns:
    The plan of the run, compared with AllReduce.

  Raises:
    ValueError: One line, if the cluster is unknown, or if the run does not fit
      on it.
  """
  run_cluster = cluster_of(config, cluster)
  plan = _plan(config.sync.method, config, run_cluster, options, device_bytes)
  allreduce = _plan(
    "allreduce",
    of_method(config, "allreduce"),
    run_cluster,
    options,
    device_bytes,
  )
  return dataclasses.replace(
    plan, allreduce_tokens_per_s=allreduce.tokens_per_s
  )


def compare_methods(
  config: RunConfig,
  cluster: str,
  options: Options = _DERIVED,
  device_bytes: float | None = None,
) -> tuple[list[MethodPlan], dict[str, str]]:
  """Compares all methods on the links of a cluster.

  The settings of a method are chosen in this order:

  1. If the config sets fields of its own method, this method keeps them.
  2. Other methods take the settings whose loss was measured with the nearest
     number of replicas. If the config sets H, these must have this H.
  3. A method without such a measurement takes its recipe. The rank of a
     low-rank codec grows with the width of the model.

  Args:
    config: Config with the model, the batch of a replica and the settings of
      the inner optimizer.
    cluster: Name of a cluster preset, or path of a cluster file.
    options: What config and cluster leave open. If they state the duration of a
      step, this duration belongs to the layout of the config, so no other
      layout is tried.
    device_bytes: Memory of a device (bytes). None takes it from the cluster.

  Returns:
    The best plan of each method, and for each method that does not go with the
    config the reason. The best plan of all comes first. Plans are ordered by:

    1. whether they leave memory to spare (`LEAST_SPARE`), and whether they fit
       at all;
    2. the loss at equal time, rounded to a tenth of a percent; a plan whose
       loss was not measured comes last;
    3. the memory that they leave;
    4. their throughput.

    If the config sets an H with which no loss was measured, the throughput
    takes the place of the loss.

  Raises:
    TypeError: If the config is no `RunConfig`.
    ValueError: One line, if the cluster is unknown, or if AllReduce does not
      fit on it.
  """
  check_config(config)
  run_cluster = cluster_of(config, cluster)
  memory_bytes = _device_bytes(run_cluster, device_bytes)
  allreduce = of_method(config, "allreduce")
  candidate_layouts: list[Changes] = [{}]
  if options.step_s is None:
    candidate_layouts = _fastest_layouts(
      allreduce, run_cluster, options, memory_bytes
    )

  def plan(
    name: str, settings: RunConfig, gap: MeasuredGap | None = None
  ) -> MethodPlan:
    divided = _with_layout(settings, candidate_layouts, memory_bytes)
    with_layout = _plan(name, divided, run_cluster, options, memory_bytes)
    return dataclasses.replace(with_layout, gap=gap)

  plans: list[list[MethodPlan]] = []
  refused: dict[str, str] = {}
  for method in METHODS:
    try:
      candidates = _candidates(config, method)
      plans.append([plan(method, one, gap) for one, gap in candidates])
    except ValueError as error:
      refused[method] = str(error)
  require("allreduce" not in refused, refused.get("allreduce", ""))
  plans.append([plan(NARROW_ALLREDUCE, changed(allreduce, _NARROW))])
  return _ranked(plans), refused


def _ranked(plans: Sequence[Sequence[MethodPlan]]) -> list[MethodPlan]:
  """Returns the best plan of each method, in the order of `compare_methods`.

  Args:
    plans: Plans of each method, which differ in their settings.
  """
  all_plans = [plan for candidates in plans for plan in candidates]
  with_room = [plan for plan in all_plans if plan.has_room] or all_plans
  fastest = max(plan.tokens_per_s for plan in with_room)
  (allreduce,) = (plan.tokens_per_s for plan in all_plans if plan.is_baseline)
  # If no loss was measured with the config's H, only the speed is known.
  knows_losses = any(
    plan.gap is not None and "sync.sync_interval" in plan.gap.settings
    for plan in all_plans
  )

  def key(plan: MethodPlan) -> tuple[float, ...]:
    slowness = -float(f"{plan.tokens_per_s:.3g}")
    if not knows_losses:
      rank = slowness
    elif plan.is_measured:
      rank = round(plan.gap_at_equal_time, 3)
    else:
      rank = math.inf
    return not plan.has_room, not plan.fits, rank, -plan.spare, slowness

  best_plans = []
  for candidates in plans:
    compared = [
      dataclasses.replace(
        plan, allreduce_tokens_per_s=allreduce, fastest_tokens_per_s=fastest
      )
      for plan in candidates
    ]
    best_plans.append(min(compared, key=key))
  return sorted(best_plans, key=key)


def _candidates(
  config: RunConfig, method: str
) -> list[tuple[RunConfig, MeasuredGap | None]]:
  """Returns the settings of a method that are compared, each with its gap.

  Args:
    config: Config of the run.
    method: Name of the method.

  Returns:
    Configs with the method, each with the gap that was measured with its
    settings, or with None. There is at least one.
  """
  gaps = measured_gaps(method, config.mesh.num_replicas)
  if _sets_fields_of(method, config):
    fixed_rank = changed(config, {"adaptive.mode": "off"})
    for gap in gaps:
      if _has_settings_of(gap, fixed_rank):
        return [(fixed_rank, gap)]
    return [(fixed_rank, None)]
  config_interval = config.sync.sync_interval  # None if the config sets no H.
  candidates: dict[tuple[Any, ...], tuple[RunConfig, MeasuredGap]] = {}
  for gap in gaps:
    interval = gap.settings.get("sync.sync_interval")
    if config_interval and interval and interval != config_interval:
      continue
    if not _has_plain_muon(gap):
      continue
    settings = dict(gap.settings)
    # An average of the parameters would need memory for one more copy of them,
    # so plans have none.
    average_power = settings.pop("outer.average_power", 0.0)
    candidate = of_method(config, method, settings)
    schedule = (
      candidate.sync.sync_interval,
      candidate.sync.num_fragments,
      candidate.exchange.codec,
    )
    # The gap without an average is preferred, because the plan has none.
    if schedule not in candidates or not average_power:
      candidates[schedule] = candidate, gap
  if candidates:
    return list(candidates.values())
  return [(of_method(config, method), None)]


def _has_plain_muon(gap: MeasuredGap) -> bool:
  """Whether a gap was measured with Muon and its default momentum.

  The gaps of all methods were measured with it, so they can be compared.
  """
  has_default_momentum = "inner.momentum" not in gap.settings
  return gap.settings["inner.optimizer"] == "muon" and has_default_momentum


def _sets_fields_of(method: str, config: RunConfig) -> bool:
  """Whether a config has this method and sets fields that its recipe decides.

  Args:
    method: Name of the method.
    config: The config.
  """
  if method != config.sync.method_name:
    return False
  recipe = from_mapping({"sync.method": method})
  # The collective is not compared: a mailbox is no setting of a method.
  exchange = dataclasses.replace(
    config.exchange, collective=recipe.exchange.collective
  )
  return (
    config.sync != recipe.sync
    or exchange != recipe.exchange
    or config.outer != recipe.outer
  )


def _has_settings_of(gap: MeasuredGap, config: RunConfig) -> bool:
  """Whether a gap was measured with the settings of a config."""
  values = flat(config.to_mapping())
  schedule = config.sync.named.schedule
  values["sync.sync_interval"] = schedule.sync_interval
  values["sync.num_fragments"] = schedule.num_fragments
  for path, value in gap.settings.items():
    if path == "exchange.codec":
      if link_names(values[path]) != link_names(value):
        return False
    elif values[path] != value:
      return False
  return True


def of_method(
  config: RunConfig, method: str, settings: Mapping[str, Any] | None = None
) -> RunConfig:
  """Returns the config with another method, whose recipe fills the fields.

  The rank does not adapt (`adaptive.mode="off"`), so that all rounds cost the
  same. A mailbox stays if the method can use one, and so does the config's H.

  Args:
    config: Config whose model, data and settings of the inner optimizer stay.
    method: Name of the method.
    settings: Values in place of those of the recipe, by dotted name. None: if
      the method is that of the config, its fields stay as they are.
  """
  if method == config.sync.method_name and settings is None:
    return changed(config, {"adaptive.mode": "off"})
  changes: Changes = {"sync.method": method, "adaptive.mode": "off"}
  changes |= settings or {}
  if config.sync.sync_interval and method not in _EVERY_STEP:
    changes["sync.sync_interval"] = config.sync.sync_interval
  if method == "dilocox":
    rank = max(config.model.shape.model_dim // _WIDTH_PER_RANK, 1)
    changes["exchange.codec"] = f"low_rank(rank={rank})+int(bits=4)"
  values = config.to_mapping() | {section: {} for section in _METHOD_SECTIONS}
  if method in _EVERY_STEP:
    values["mailbox"] = {}
  elif config.uses_mailbox:
    changes["exchange.collective"] = MAILBOX
  values["inner"] |= {"optimizer": None, "momentum": 0.0}
  return from_mapping(flat(values) | changes)


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
  """Returns a copy of the config with some fields changed.

  Args:
    config: Config to copy.
    changes: New values by dotted name, such as "sync.sync_interval".

  Raises:
    ValueError: One line, if the new config is wrong.
  """
  return from_mapping(flat(config.to_mapping()) | dict(changes))


def _plan(
  name: str,
  config: RunConfig,
  cluster: Cluster,
  options: Options,
  device_bytes: float | None,
) -> MethodPlan:
  """Returns the plan of a config, without a comparison and without a gap."""
  setup = set_up(config, cluster, options)
  memory_bytes = _device_bytes(setup.link_costs.cluster, device_bytes)
  return MethodPlan(
    name=name,
    config=config,
    setup=setup,
    rounds=steady_state(setup.link_costs, setup.work, setup.script, setup.plan),
    memory=device_memory(config, memory_bytes),
    device_bytes=memory_bytes,
  )


def _device_bytes(cluster: Cluster, stated_bytes: float | None) -> float:
  """Returns the memory of a device (bytes); infinity if it is not known.

  Args:
    cluster: The cluster, whose smallest device counts.
    stated_bytes: Memory that takes the place of the cluster's, or None.
  """
  if stated_bytes is not None:
    return stated_bytes
  return least_memory(cluster)


def layouts(config: RunConfig, num_devices: int) -> Iterator[Changes]:
  """Yields layouts, which divide a replica among its devices.

  A layout is a number of data shards, of tensor shards, of stages and of
  micro-batches. Some devices may stay idle. For each number of shards, the
  number of stages is one of these: 1, as many as there are devices for, the
  largest divisor of the number of layers, or the largest power of two. Example:
  78 layers on 80 devices may have 39 stages x 2 shards, or 32 x 2 on 64 of the
  devices. Tensor shards are a power of two, at most the eight devices that
  share fast links in most machines.

  If there are stages, the backward pass computes the activations again, because
  models that need stages need the memory. Without stages there is a layout with
  the config's `mesh.remat`, and one in which the backward computes everything
  again. The data shards of a stage collect its layers in either way
  (`mesh.gather`).

  Args:
    config: Config whose model and batch are divided.
    num_devices: Devices of one replica.

  Yields:
    The fields of the config that set the layout.
  """
  if num_devices == 1:
    yield {}
    return
  batch = config.data.batch_size
  num_heads = math.gcd(
    config.model.shape.num_heads, config.model.shape.kv_heads
  )
  for tensor_shards in _powers_of_two_in(num_heads):
    if tensor_shards > min(_MOST_TENSOR_SHARDS, num_devices):
      continue
    for shards in range(1, num_devices // tensor_shards + 1):
      if batch % shards:
        continue
      num_left = num_devices // tensor_shards // shards
      for stages in _numbers_of_stages(config, num_left):
        for choice in _remat_and_gather(config, shards, stages):
          for micro_batches in _powers_of_two_in(batch // shards):
            yield choice | {
              "mesh.layout": "mesh",
              "mesh.num_stages": stages,
              "mesh.num_data_shards": shards,
              "mesh.num_tensor_shards": tensor_shards,
              "inner.accumulate_steps": micro_batches,
            }


def _numbers_of_stages(config: RunConfig, num_devices: int) -> list[int]:
  """Returns the numbers of stages that `layouts` tries.

  Args:
    config: Config whose model is divided.
    num_devices: Devices that are left for stages.
  """
  num_layers = config.model.shape.num_layers
  most = min(num_devices, num_layers)
  even = max(n for n in range(1, most + 1) if num_layers % n == 0)
  power_of_two = 2 ** int(math.log2(most))
  return sorted({1, most, even, power_of_two})


def _remat_and_gather(
  config: RunConfig, num_data_shards: int, num_stages: int
) -> list[Changes]:
  """Returns the values of mesh.remat and mesh.gather that `layouts` tries.

  Args:
    config: Config whose model is divided.
    num_data_shards: Number of data shards.
    num_stages: Number of stages.
  """
  if num_stages == 1:
    remats = dict.fromkeys((config.mesh.remat, "full"))
    return [{"mesh.remat": remat} for remat in remats]
  choices: list[Changes] = [{"mesh.remat": "full", "mesh.gather": "stage"}]
  if num_data_shards > 1:
    choices.append({"mesh.remat": "full", "mesh.gather": "layer"})
  return choices


def _powers_of_two_in(number: int) -> list[int]:
  """Returns the powers of two that divide a number."""
  return [2**n for n in range(number.bit_length()) if not number % 2**n]


def _fastest_layouts(
  allreduce: RunConfig, cluster: Cluster, options: Options, device_bytes: float
) -> list[Changes]:
  """Returns the layouts of AllReduce that fit, the fastest first.

  If none fits, the layout that needs the least memory is returned. AllReduce
  needs the least memory of all methods, so a layout that does not fit for
  AllReduce fits for no method.

  Args:
    allreduce: Config of AllReduce.
    cluster: The cluster.
    options: What config and cluster leave open.
    device_bytes: Memory of a device (bytes).

  Raises:
    ValueError: One line, if no layout goes with the batch.
  """
  num_devices = min(map(cluster.num_devices, range(cluster.num_replicas)))
  possible: list[tuple[int, RunConfig, Changes]] = []
  for layout in layouts(allreduce, num_devices):
    # Some layouts do not go with the config, and are left out.
    with contextlib.suppress(ValueError):
      divided = changed(allreduce, layout)
      needed_bytes = device_memory(divided, device_bytes).total
      possible.append((needed_bytes, divided, layout))
  require(
    bool(possible),
    f"no division of {num_devices} devices goes with data.batch_size="
    f"{allreduce.data.batch_size}: take a multiple of {num_devices}",
  )
  fitting = [entry for entry in possible if entry[0] <= device_bytes]
  if not fitting:
    fitting = [min(possible, key=lambda entry: entry[0])]
  timed: list[tuple[float, int, int, Changes]] = []
  for needed_bytes, divided, layout in fitting:
    # A pipeline may be too long for the devices of a site.
    with contextlib.suppress(ValueError):
      step_s = float(set_up(divided, cluster, options).work.step_s.max())
      # The time of what the backward computes again is not known. So of equally
      # fast layouts the one that computes least again comes first.
      num_again = REMATS.index(divided.mesh.remat)
      timed.append((step_s, num_again, needed_bytes, layout))
  timed.sort(key=lambda entry: entry[:3])
  return _useful_layouts(timed)


def _useful_layouts(
  timed: Sequence[tuple[float, int, int, Changes]],
) -> list[Changes]:
  """Leaves out layouts that are slower than others and need no less memory.

  Other methods need more memory than AllReduce: on each device its share of
  the same copies. So only layouts with equally many devices are compared.

  Args:
    timed: Layouts, the fastest first. Each is the time of a step, an order
      among equal times, the memory of a device (bytes), and the layout.
  """
  useful: list[Changes] = []
  least_bytes: dict[int, int] = {}
  for _, _, needed_bytes, layout in timed:
    num_devices = math.prod(layout.get(field, 1) for field in _COUNTS)
    if needed_bytes < least_bytes.get(num_devices, needed_bytes + 1):
      least_bytes[num_devices] = needed_bytes
      useful.append(layout)
  return useful


def _with_layout(
  config: RunConfig, candidate_layouts: Sequence[Changes], device_bytes: float
) -> RunConfig:
  """Returns the config with the first layout that leaves memory to spare.

  If there is none, the first layout that fits is taken, and otherwise the
  layout that needs the least memory.

  Args:
    config: Config of a run.
    candidate_layouts: Layouts, the fastest first.
    device_bytes: Memory of a device (bytes).
  """
  divided = []
  for layout in candidate_layouts:
    divided.append(changed(config, layout) if layout else config)
  needed_bytes = [device_memory(one, device_bytes).total for one in divided]
  for limit in ((1 - LEAST_SPARE) * device_bytes, device_bytes):
    for one, needed in zip(divided, needed_bytes, strict=True):
      if needed <= limit:
        return one
  return divided[needed_bytes.index(min(needed_bytes))]
