"""What training by each method would cost on given clusters, and what fits.

A plan is a method with the model and the batch of a config, and a division of
each replica among its devices: the fastest one that fits with some memory to
spare. Of H, P and the codec a plan has those whose loss was measured
(`api.measured_gaps`), and the method's recipe where nothing was. Plans are
ranked by the loss that they would reach at equal time.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dilocox_jax.api.device_memory import (
  LEAST_SPARE,
  DeviceMemory,
  device_memory,
)
from dilocox_jax.api.measured_gaps import (
  MeasuredGap,
  measured_gaps,
  share_of_more_steps,
)
from dilocox_jax.api.simulation_setup import Options, Setup, cluster_of, set_up
from dilocox_jax.checks import flat, require
from dilocox_jax.codecs.named import link_names
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.config.run import check_config
from dilocox_jax.plan.collectives import MAILBOX
from dilocox_jax.plan.schedule.methods import METHODS
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.steps import SteadyState, steady_state

# Sections that belong to the method; those of another method do not apply.
_OF_METHOD = ("sync", "exchange", "adaptive", "outer")
_EVERY_STEP = ("allreduce", "cocktail_sgd")
_RANK_SHARE = 8  # The recipe has rank 16 for a model of width 128.
_HIDDEN = 0.999  # Share of the time in inner steps where all transfers hide.
NARROW_ALLREDUCE = "allreduce bf16"

_DERIVED = Options()

Changes = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class MethodPlan:
  """One way to train, and what it costs.

  Attributes:
    name: Name of the method; AllReduce of bfloat16 has one of its own.
    config: Config of the run.
    setup: The run on the cluster, ready to be timed.
    rounds: Costs of rounds in the middle of a long run (simulated).
    memory: Memory of a device (its state derived, the rest estimated).
    device_bytes: Memory that each device has (bytes); infinity: not known.
    allreduce_tokens_per_s: What AllReduce of float32 would make on the same
      links (tokens per second).
    fastest_tokens_per_s: What the fastest of the plans makes that are compared.
    gap: What was measured of the loss of these settings; None: nothing. Of
      AllReduce it is None too, as it is what a gap compares with.
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
    """Whether gaps compare with this plan."""
    return self.name == "allreduce"

  @property
  def is_measured(self) -> bool:
    """Whether the loss of these settings beside AllReduce's is known."""
    return self.is_baseline or self.gap is not None

  @property
  def gap_at_equal_time(self) -> float:
    """Loss beside that of AllReduce with as many steps as the fastest plan.

    The measured gap, and what a slower plan loses because it makes fewer steps
    in the same time (derived, `measured_gaps.share_of_more_steps`). NaN if the
    gap was not measured.
    """
    if not self.is_measured:
      return math.nan
    gap = self.gap.gap if self.gap else 0.0
    ratio = self.tokens_per_s / self.fastest_tokens_per_s
    return (1 + gap) * share_of_more_steps(ratio) - 1

  @property
  def spare(self) -> float:
    """Share of a device's memory that is left; below 0 if it lacks some."""
    if math.isinf(self.device_bytes):
      return 1.0
    return 1 - self.memory.total / self.device_bytes

  @property
  def has_room(self) -> bool:
    """Whether a device has enough memory to spare to recommend the plan."""
    return self.spare >= LEAST_SPARE

  @property
  def hides(self) -> bool:
    """Whether inner steps take all of the time."""
    return self.rounds.utilization >= _HIDDEN

  @property
  def tokens_per_s(self) -> float:
    """Tokens of all replicas together (tokens per second)."""
    steps_per_s = self.rounds.replica_steps / self.rounds.step_s
    return steps_per_s * self.config.tokens_per_replica_step

  @property
  def speed_up(self) -> float:
    """How many times as fast as AllReduce."""
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
    """Why the plan is not recommended, whatever its loss; "" if it may be."""
    if self.has_room:
      return ""
    needed, has = self.memory.total / 1e9, self.device_bytes / 1e9
    said = f"a device needs {needed:.3g} GB and has {has:.3g} GB"
    if self.fits:
      least = f"{100 * LEAST_SPARE:.0f} %"
      said += f", so less than {least} is left for a wrong estimate"
    return said


def plan_run(
  config: RunConfig,
  cluster: str,
  options: Options = _DERIVED,
  device_bytes: float | None = None,
) -> MethodPlan:
  """Says what a run costs as it is, beside AllReduce on the same mesh.

  Args:
    config: Config of the run.
    cluster: Name of a cluster preset, or path of a cluster file.
    options: What config and cluster leave open.
    device_bytes: Memory of a device; None: that of the cluster.

  Raises:
    ValueError: If config and cluster do not fit.
  """
  placed = cluster_of(config, cluster)
  name = config.sync.method
  own = _plan(name, config, placed, options, device_bytes)
  every_step = of_method(config, "allreduce")
  base = _plan("allreduce", every_step, placed, options, device_bytes)
  return dataclasses.replace(own, allreduce_tokens_per_s=base.tokens_per_s)


def compare_methods(
  config: RunConfig,
  cluster: str,
  options: Options = _DERIVED,
  device_bytes: float | None = None,
) -> tuple[list[MethodPlan], dict[str, str]]:
  """Compares all methods on the links of a cluster.

  Args:
    config: Config with the model, the batch of a replica and the inner
      optimizer's settings. Its own method keeps all that it says, if it says
      more than its name. The others have the settings whose loss was measured
      at the nearest number of replicas, or their recipe if nothing was or if
      the config says another H. A rank follows the model's width.
    cluster: Name of a cluster preset, or path of a cluster file.
    options: What config and cluster leave open. Where a step's duration is
      stated, it is that of the config's mesh, and no other is tried.
    device_bytes: Memory of a device; None: that of the cluster.

  Returns:
    Plans, the best first: those with memory to spare (`LEAST_SPARE`), among
    them those whose loss was measured, and among these by the loss at equal
    time. Where these losses agree in a tenth of a per cent, more memory to
    spare counts, and then speed. And for each method that does not go with the
    config, the reason.

  Raises:
    TypeError: If the config is no `RunConfig`.
    ValueError: If config and cluster do not fit.
  """
  check_config(config)
  placed = cluster_of(config, cluster)
  has = _device_bytes(placed, device_bytes)
  base = of_method(config, "allreduce")
  ways: list[Changes] = [{}]
  if options.step_s is None:
    ways = _fastest_layouts(base, placed, options, has)
  plans, refused = [], {}
  for method in METHODS:
    try:
      candidates = [
        dataclasses.replace(
          _plan(method, _divided(one, ways, has), placed, options, has),
          gap=gap,
        )
        for one, gap in _candidates(config, method)
      ]
    except ValueError as error:
      refused[method] = str(error)
      continue
    plans.append(candidates)
  names = [candidates[0].name for candidates in plans]
  require("allreduce" in names, refused.get("allreduce", ""))
  narrow = _divided(changed(base, _NARROW), ways, has)
  plans.append([_plan(NARROW_ALLREDUCE, narrow, placed, options, has)])
  return _ranked(plans), refused


# Gradients of two bytes a value, as most frameworks send them.
_NARROW = {"exchange.codec": "bfloat16"}


def _ranked(plans: Sequence[Sequence[MethodPlan]]) -> list[MethodPlan]:
  """Returns the best plan of each method, the best of all first.

  Args:
    plans: Plans of each method, which differ in their settings.
  """
  every = [plan for candidates in plans for plan in candidates]
  with_room = [plan for plan in every if plan.has_room] or every
  fastest = max(plan.tokens_per_s for plan in with_room)
  (base,) = (plan.tokens_per_s for plan in every if plan.is_baseline)
  # If the config says an H that nobody measured, speed alone is known.
  knows_losses = any(
    plan.gap is not None and "sync.sync_interval" in plan.gap.settings
    for plan in every
  )

  def key(plan: MethodPlan) -> tuple[float, ...]:
    speed = -float(f"{plan.tokens_per_s:.3g}")
    order = [not plan.has_room, not plan.fits]
    if knows_losses:
      loss = plan.gap_at_equal_time if plan.is_measured else math.inf
      order += [round(loss, 3)]
    else:
      order += [speed]
    return *order, -plan.spare, speed

  found = []
  for candidates in plans:
    complete = [
      dataclasses.replace(
        plan, allreduce_tokens_per_s=base, fastest_tokens_per_s=fastest
      )
      for plan in candidates
    ]
    found.append(min(complete, key=key))
  return sorted(found, key=key)


def _candidates(
  config: RunConfig, method: str
) -> list[tuple[RunConfig, MeasuredGap | None]]:
  """Returns the settings of a method that are compared, and their gaps."""
  if _says_more_than_its_name(config, method):
    own = changed(config, {"adaptive.mode": "off"})
    gaps = measured_gaps(method, config.mesh.num_replicas)
    same = [gap for gap in gaps if _is_of(gap, own)]
    return [(own, same[0] if same else None)]
  asked = config.sync.sync_interval  # H that the config says, if it does.
  found: dict[tuple[Any, ...], tuple[RunConfig, MeasuredGap]] = {}
  for gap in measured_gaps(method, config.mesh.num_replicas):
    interval = gap.settings.get("sync.sync_interval")
    if asked and interval and interval != asked:
      continue
    if not _is_usual(gap):
      continue
    settings = dict(gap.settings)
    # A plan keeps no average, which would be one copy of the parameters more.
    average = settings.pop("outer.average_power", 0.0)
    one = of_method(config, method, settings)
    sync = one.sync
    schedule = sync.sync_interval, sync.num_fragments, one.exchange.codec
    if schedule not in found or not average:
      found[schedule] = one, gap
  if found:
    return list(found.values())
  return [(of_method(config, method), None)]


def _is_usual(gap: MeasuredGap) -> bool:
  """Whether a gap is that of Muon as it is, which all methods were given."""
  settings = gap.settings
  is_changed = "inner.momentum" in settings
  return settings["inner.optimizer"] == "muon" and not is_changed


def _says_more_than_its_name(config: RunConfig, method: str) -> bool:
  """Whether a method is the config's own, with settings beside its recipe."""
  if method != config.sync.method_name:
    return False
  plain = from_mapping({"sync.method": method})
  # Where replicas meet is no setting of a method.
  collective = plain.exchange.collective
  exchange = dataclasses.replace(config.exchange, collective=collective)
  return (
    config.sync != plain.sync
    or exchange != plain.exchange
    or config.outer != plain.outer
  )


def _is_of(gap: MeasuredGap, config: RunConfig) -> bool:
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
  """Returns the config with another method's recipe; its own stays as it is.

  Args:
    config: Config whose model, data and optimizer's settings stay.
    method: Name of the method.
    settings: Values in place of the recipe's, also of the config's own method.
  """
  if method == config.sync.method_name and settings is None:
    return changed(config, {"adaptive.mode": "off"})
  changes: Changes = {"sync.method": method, "adaptive.mode": "off"}
  changes |= settings or {}
  if config.sync.sync_interval and method not in _EVERY_STEP:
    changes["sync.sync_interval"] = config.sync.sync_interval
  if method == "dilocox":
    rank = max(config.model.shape.model_dim // _RANK_SHARE, 1)
    changes["exchange.codec"] = f"low_rank(rank={rank})+int(bits=4)"
  values = config.to_mapping() | {section: {} for section in _OF_METHOD}
  if method in _EVERY_STEP:
    values["mailbox"] = {}
  elif config.uses_mailbox:  # So do all methods that can.
    changes["exchange.collective"] = MAILBOX
  values["inner"] |= {"optimizer": None, "momentum": 0.0}
  return from_mapping(flat(values) | changes)


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
  """Returns the config with changes, by dotted names.

  Args:
    config: Config to begin with; it stays as it is.
    changes: New values by names such as "sync.sync_interval".
  """
  return from_mapping(flat(config.to_mapping()) | dict(changes))


def _plan(
  name: str,
  config: RunConfig,
  cluster: Cluster,
  options: Options,
  device_bytes: float | None,
) -> MethodPlan:
  setup = set_up(config, cluster, options)
  rounds = steady_state(setup.link_costs, setup.work, setup.script, setup.plan)
  has = _device_bytes(setup.link_costs.cluster, device_bytes)
  memory = device_memory(config)
  return MethodPlan(name, config, setup, rounds, memory, has)


def _device_bytes(cluster: Cluster, stated: float | None) -> float:
  known = (site.memory_bytes for site in cluster.sites if site.memory_bytes)
  return min(known, default=math.inf) if stated is None else stated


def layouts(config: RunConfig, num_devices: int) -> Iterator[Changes]:
  """Yields ways to divide a replica among its devices, of which some may idle.

  For each number of data shards there are as many stages as fit, the largest
  divisor of the layers, and the largest power of two: 78 layers on 80 devices
  may be 39 x 2, and 64 devices 32 x 2. Stages compute everything again in the
  backward pass, as models that need stages do.

  Args:
    config: Config whose model and batch are divided.
    num_devices: Devices of one replica.
  """
  if num_devices == 1:
    yield {}
    return
  batch, layers = config.data.batch_size, config.model.shape.num_layers
  for shards in (n for n in range(1, num_devices + 1) if not batch % n):
    most = min(num_devices // shards, layers)
    even = max(n for n in range(1, most + 1) if not layers % n)
    for stages in sorted({1, most, even, 2 ** int(math.log2(most))}):
      for micro_batches in _powers_of_two_in(batch // shards):
        remat = {"mesh.remat": "full"} if stages > 1 else {}
        yield remat | {
          "mesh.layout": "mesh",
          "mesh.num_stages": stages,
          "mesh.num_data_shards": shards,
          "inner.accumulate_steps": micro_batches,
        }


def _powers_of_two_in(number: int) -> list[int]:
  """Returns the powers of two that divide a number."""
  return [2**n for n in range(number.bit_length()) if not number % 2**n]


def _fastest_layouts(
  base: RunConfig, cluster: Cluster, options: Options, device_bytes: float
) -> list[Changes]:
  """Returns the layouts that fit, the fastest first; else the smallest.

  AllReduce keeps the least of all methods, so what is too small for it is too
  small for the others.

  Args:
    base: Config of AllReduce.
    cluster: The cluster.
    options: What config and cluster leave open.
    device_bytes: Memory of a device.
  """
  devices = min(map(cluster.num_devices, range(cluster.num_replicas)))
  found: list[tuple[float, int, Changes]] = []
  for way in layouts(base, devices):
    with contextlib.suppress(ValueError):
      one = changed(base, way)
      seconds = set_up(one, cluster, options).work.step_s.max()
      found.append((float(seconds), device_memory(one).total, way))
  require(
    bool(found),
    f"no division of {devices} devices goes with data.batch_size="
    f"{base.data.batch_size}: take a multiple of {devices}",
  )
  fitting = [entry for entry in found if entry[1] <= device_bytes]
  fitting = fitting or [min(found, key=lambda entry: entry[1])]
  return [way for *_, way in sorted(fitting, key=lambda entry: entry[:2])]


def _divided(
  config: RunConfig, ways: Sequence[Changes], device_bytes: float
) -> RunConfig:
  """Returns the config with the first layout that fits, else the smallest.

  One that leaves enough memory to spare comes before one that only fits.
  """
  divided = [changed(config, way) if way else config for way in ways]
  needed = [device_memory(one).total for one in divided]
  for limit in ((1 - LEAST_SPARE) * device_bytes, device_bytes):
    for one, size in zip(divided, needed, strict=True):
      if size <= limit:
        return one
  return divided[needed.index(min(needed))]
