"""Plans how each method would train a model on a cluster, and ranks the plans.

A plan is a method with its settings, such as its codec, and a layout: how each
replica is divided among its devices. `compare_methods` says how settings are
chosen and plans are ranked.
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
from dilocox_jax.config.run_gap import run_gap
from dilocox_jax.gap.expected import ExpectedGap
from dilocox_jax.gap.gain import NUM_ERRORS, gain_of_size
from dilocox_jax.gap.law import Estimate, law
from dilocox_jax.plan.choices import REMATS
from dilocox_jax.plan.collectives import MAILBOX
from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.plan.schedule.methods import METHODS
from dilocox_jax.report.units import human_bytes
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.steps import SteadyState, steady_state

# Sections whose values belong to a method. A change of the method drops them.
_METHOD_SECTIONS = ("sync", "exchange", "adaptive", "outer")
# Methods that average gradients in every step.
_EVERY_STEP = ("allreduce", "cocktail_sgd")
# Largest number of tensor shards in a plan. More of them would have to use the
# slower links between machines.
_MOST_TENSOR_SHARDS = 8
# Fields whose product is the number of devices of a replica.
_COUNTS = ("mesh.num_stages", "mesh.num_data_shards", "mesh.num_tensor_shards")
# The rank of a low-rank codec is the width of the model divided by this number.
# The recipe has rank 16 for width 128.
_WIDTH_PER_RANK = 8
_INTERVAL = "sync.sync_interval"
# Where H is chosen for a run, the run has at least 8 rounds, as the runs behind
# the law of gaps have, and H is at most 500, as in the papers of the methods.
LEAST_ROUNDS = 8
MOST_STEPS_PER_ROUND = 500
# If replicas compute for at least this share of the time, all transfers count
# as hidden behind inner steps.
_HIDDEN = 0.999
# Name of the plan that sends gradients with two bytes for each value, as most
# frameworks do.
NARROW_ALLREDUCE = "allreduce bf16"
_NARROW: Mapping[str, Any] = {"exchange.codec": "bfloat16"}

# Values of fields in all runs whose gap was measured, unless the settings of
# the gap have the field.
_USUAL: Mapping[str, Any] = {
  "sync.first_interval": None,
  "sync.steps_per_doubling": None,
  "outer.schedule": "constant",
  "outer.optimizer": "sgd",
}

# By default, durations are derived from config and cluster.
_DERIVED = Options()

# New values of fields of a config, by dotted name.
Changes = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class MethodPlan:
  """One way to train, and what it costs.

  Attributes:
    name: Name of the method; "allreduce bf16" for AllReduce in bfloat16.
    config: Config of the run.
    setup: The run on the cluster, ready to be timed.
    rounds: Costs of rounds in the middle of a long run (simulated).
    memory: Memory that a device needs (partly estimated).
    device_bytes: Memory that a device has (bytes); infinity if it is not known.
    allreduce_tokens_per_s: Throughput of AllReduce in float32 on the same
      cluster (tokens per second); NaN before the plan was compared.
    fastest_tokens_per_s: Throughput of the fastest plan that leaves enough
      memory free, or of the fastest plan if none does (tokens per second); NaN
      if `compare_methods` did not make this plan.
    gap: Measured gap to AllReduce's loss with these settings. None if it was
      not measured, for AllReduce itself, and from `plan_run`.
    expected: Gap that `config.run_gap` predicts. None for one replica, for
      methods that exchange gradients at every step, and from `plan_run`.
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
  expected: ExpectedGap | None = None

  @property
  def is_baseline(self) -> bool:
    """Whether the plan's name is "allreduce", the baseline of all gaps."""
    return self.name == "allreduce"

  @property
  def is_measured(self) -> bool:
    """Whether the method's gap was measured, or the plan is the baseline.

    A gap was measured if `gap` is not None. It was also measured if `expected`
    is not None, and runs of the method are among those to which the law of
    `expected` was fitted.
    """
    if self.is_baseline or self.gap is not None:
      return True
    return self.expected is not None and self.name in law().factors

  @property
  def gap_at_equal_time(self) -> float:
    """How much higher the loss is than that of a fast AllReduce in equal time.

    The fast AllReduce is imagined: it makes as many steps as the fastest plan.
    Two things raise the loss of a plan: the gap of its method at equal steps,
    and fewer steps in the same time if it is slower (`share_of_more_steps`).
    0.02 is a loss that is 2 % higher. NaN if no gap of the method was measured,
    and for a plan from `plan_run`.
    """
    return self._at_equal_time(self.gap_range.value)

  @property
  def worst_gap_at_equal_time(self) -> float:
    """Upper end of the range of `gap_at_equal_time`, or NaN."""
    return self._at_equal_time(self.gap_range.high)

  @property
  def gap_range(self) -> Estimate:
    """The gap at equal steps, with its range.

    - `expected`, if it is not None.
    - Otherwise `gap`, with two standard errors on each side, if it is not None.
    - Otherwise 0: for AllReduce, and also if the gap is not known.
    """
    if self.expected is not None:
      expected = self.expected
      return Estimate(expected.gap, low=expected.low, high=expected.high)
    if self.gap is None:
      return Estimate(0.0, 0.0, 0.0)
    width = NUM_ERRORS * self.gap.error
    return Estimate(
      self.gap.gap, low=self.gap.gap - width, high=self.gap.gap + width
    )

  def _at_equal_time(self, gap: float) -> float:
    """Adds the cost of fewer steps in equal time to a gap at equal steps.

    The result is NaN in the cases of `gap_at_equal_time`.
    """
    if not self.is_measured:
      return math.nan
    ratio = self.tokens_per_s / self.fastest_tokens_per_s
    return (1 + gap) * share_of_more_steps(ratio) - 1

  @property
  def spare(self) -> float:
    """Share of a device's memory that the plan leaves free.

    It is below 0 if the plan does not fit, and 1 if a device's memory is
    unknown.
    """
    if math.isinf(self.device_bytes):
      return 1.0
    return 1 - self.memory.total / self.device_bytes

  @property
  def has_room(self) -> bool:
    """Whether at least a tenth of the memory is left free (`LEAST_SPARE`)."""
    return self.spare >= LEAST_SPARE

  @property
  def hides(self) -> bool:
    """Whether replicas compute for at least 99.9 % of the time."""
    return self.rounds.utilization >= _HIDDEN

  @property
  def tokens_per_s(self) -> float:
    """Throughput of all replicas together (tokens per second)."""
    steps_per_s = self.rounds.replica_steps / self.rounds.step_s
    return steps_per_s * self.config.tokens_per_replica_step

  @property
  def speed_up(self) -> float:
    """Throughput divided by `allreduce_tokens_per_s`."""
    return self.tokens_per_s / self.allreduce_tokens_per_s

  @property
  def bytes_per_day(self) -> float:
    """Bytes that one replica sends in a day."""
    return self.rounds.sent_bytes / self.rounds.step_s * 86_400

  @property
  def fits(self) -> bool:
    """Whether a device has the memory that the plan needs; True if unknown."""
    return self.memory.total <= self.device_bytes

  @property
  def reason(self) -> str:
    """Why too little memory is left free, in words; "" if `has_room`."""
    if self.has_room:
      return ""
    needed = human_bytes(self.memory.total)
    reason = f"a device needs {needed} and has {human_bytes(self.device_bytes)}"
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
  """Plans a run as its config describes it, and compares it with AllReduce.

  This AllReduce divides a replica among its devices as the config does.

  Args:
    config: Config of the run.
    cluster: Name of a cluster preset, or path of a cluster file.
    options: Durations and transport, which neither config nor cluster states.
    device_bytes: Memory of a device (bytes). None takes it from the cluster.

  Returns:
    The plan of the run. Its `allreduce_tokens_per_s` is set.

  Raises:
    ValueError: One line, if the cluster is unknown or the run does not fit on
      it.
  """
  run_cluster = cluster_of(config, cluster)
  plan = _plan(config.sync.method, config, run_cluster, options, device_bytes)
  allreduce = _plan(
    "allreduce",
    _baseline(config),
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
  gain: Estimate | None = None,
) -> tuple[list[MethodPlan], dict[str, str]]:
  """Compares all methods on a cluster.

  The settings of a method are chosen by the first rule that applies:

  1. If the config sets fields of its own method, this method keeps them.
  2. A method takes the settings of a measurement of its loss. Every measurement
     with Muon and with the nearest number of replicas is tried. If the config
     sets H, measurements with another H are left out.
  3. A method without such a measurement takes its recipe.

  If the config sets no H, rules 2 and 3 give only the first H of a method.
  2 H, 4 H, ... are tried, too, up to an eighth of the run's steps and at most
  500. The best H is taken: a longer round sends less often, but its expected
  gap is larger.

  Args:
    config: Config with the model, the batch of a replica, the number of steps,
      and the settings of the inner steps. The inner optimizer and its momentum
      may be replaced.
    cluster: Name of a cluster preset, or path of a cluster file.
    options: Durations and transport, which neither config nor cluster states.
      If they state the duration of a step, only the config's layout is tried.
    device_bytes: Memory of a device (bytes). None takes it from the cluster.
    gain: Share by which AllReduce's loss falls when its batch doubles, for the
      expected gaps. None: extrapolated from the size of the model.

  Returns:
    A tuple (plans, refused). `plans` has the best plan of each method, and one
    of AllReduce in bfloat16. `refused` has an error message for each method
    that the config does not allow. Plans are ordered, the best one first, by:

    1. whether they leave enough memory free (`LEAST_SPARE`), then whether they
       fit at all;
    2. the upper end of the range of the loss in equal time, then the expected
       loss, both rounded to 0.1 %; methods without a measured gap come last;
    3. the memory that they leave free;
    4. their throughput.

  Raises:
    TypeError: If `config` is not a `RunConfig`.
    ValueError: One line, if the cluster is unknown, if the config has a single
      replica, or if AllReduce is refused.
  """
  check_config(config)
  require(
    config.mesh.num_replicas > 1,
    "mesh.num_replicas=1: methods differ in how replicas exchange, so set at "
    "least 2",
  )
  run_cluster = cluster_of(config, cluster)
  memory_bytes = _device_bytes(run_cluster, device_bytes)
  run_gain = gain or gain_of_size(parameter_count(config.model.shape))
  allreduce = _baseline(config)
  candidate_layouts: list[Changes] = [{}]
  if options.step_s is None:
    candidate_layouts = _fastest_layouts(
      allreduce, run_cluster, options, memory_bytes
    )

  def plan(
    name: str, divided: RunConfig, gap: MeasuredGap | None = None
  ) -> MethodPlan:
    run = _plan(name, divided, run_cluster, options, memory_bytes)
    return dataclasses.replace(
      run, gap=gap, expected=run_gap(divided, run_gain)
    )

  def plans_of(method: str) -> Iterator[MethodPlan]:
    for candidate, gap in _candidates(config, method):
      divided = _with_layout(candidate, candidate_layouts, memory_bytes)
      first = divided.sync.named.schedule.sync_interval
      for interval in _intervals(config, candidate, method):
        # The gap was measured with the candidate's H, and not with any other H.
        if interval == first:
          yield plan(method, divided, gap)
        else:
          yield plan(method, changed(divided, {_INTERVAL: interval}))

  plans: list[list[MethodPlan]] = []
  refused: dict[str, str] = {}
  for method in METHODS:
    try:
      plans.append(list(plans_of(method)))
    except ValueError as error:
      refused[method] = str(error)
  require("allreduce" not in refused, refused.get("allreduce", ""))
  narrow = _with_layout(
    changed(allreduce, _NARROW), candidate_layouts, memory_bytes
  )
  plans.append([plan(NARROW_ALLREDUCE, narrow)])
  return _ranked(plans), refused


def _intervals(
  config: RunConfig, candidate: RunConfig, method: str
) -> list[int]:
  """Returns the values of H (steps of a round) with which a method is planned.

  In these cases only the candidate's H is returned:

  - The user's `config` sets H or other fields of the method.
  - The method averages in every step.

  Otherwise the values are the candidate's H, 2 H, 4 H, ..., up to the largest H
  that may be chosen. If the candidate's H exceeds this largest H, the result is
  the largest H alone.
  """
  schedule = candidate.sync.named.schedule
  is_chosen = config.sync.sync_interval or _sets_fields_of(method, config)
  if method in _EVERY_STEP or is_chosen:
    return [schedule.sync_interval]
  # A round sends each fragment once, so it has no fewer steps than fragments.
  most = max(config.total_steps // LEAST_ROUNDS, schedule.num_fragments)
  most = min(most, MOST_STEPS_PER_ROUND)
  intervals = [min(schedule.sync_interval, most)]
  while 2 * intervals[-1] <= most:
    intervals.append(2 * intervals[-1])
  return intervals


def _ranked(plans: Sequence[Sequence[MethodPlan]]) -> list[MethodPlan]:
  """Chooses the best of each method's plans, and returns these, best first.

  `plans` has a list of plans for each method.
  """
  all_plans = [plan for candidates in plans for plan in candidates]
  with_room = [plan for plan in all_plans if plan.has_room] or all_plans
  fastest = max(plan.tokens_per_s for plan in with_room)
  (allreduce,) = (plan.tokens_per_s for plan in all_plans if plan.is_baseline)

  def key(plan: MethodPlan) -> tuple[float, ...]:
    # A better plan has a smaller key; False is smaller than True.
    #
    # Throughputs that agree in three digits count as equal.
    slowness = -float(f"{plan.tokens_per_s:.3g}")
    losses = (math.inf, math.inf)
    if plan.is_measured:
      losses = (
        round(plan.worst_gap_at_equal_time, 3),
        round(plan.gap_at_equal_time, 3),
      )
    return not plan.has_room, not plan.fits, *losses, -plan.spare, slowness

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
  """Returns pairs (config with the method, measured gap) to plan, at least one.

  `compare_methods` says how settings are chosen; the rank never adapts. The gap
  is that of runs with this schedule and kind of codec; None without such runs.
  """
  if method == "allreduce":
    return [(_baseline(config), None)]
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
    interval = gap.settings.get(_INTERVAL)
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
    # One schedule with one codec is planned once. Prefer the gap of runs that
    # kept no average, because plans keep none.
    if schedule not in candidates or not average_power:
      candidates[schedule] = candidate, gap
  if candidates:
    return list(candidates.values())
  return [(of_method(config, method), None)]


def _has_plain_muon(gap: MeasuredGap) -> bool:
  """Returns whether a gap was measured with Muon and its default momentum."""
  has_default_momentum = "inner.momentum" not in gap.settings
  return gap.settings["inner.optimizer"] == "muon" and has_default_momentum


def _sets_fields_of(method: str, config: RunConfig) -> bool:
  """Returns whether a config has a method and changes one of its settings.

  The settings of a method are the fields of the sections `sync`, `exchange` and
  `outer`, except for `exchange.collective`.
  """
  if method != config.sync.method_name:
    return False
  recipe = from_mapping({"sync.method": method})
  # The collective also says whether replicas use a mailbox, which no recipe
  # decides.
  exchange = dataclasses.replace(
    config.exchange, collective=recipe.exchange.collective
  )
  return (
    config.sync != recipe.sync
    or exchange != recipe.exchange
    or config.outer != recipe.outer
  )


def _has_settings_of(gap: MeasuredGap, config: RunConfig) -> bool:
  """Returns whether a gap was measured with the settings of a config.

  Of a codec, only the names are compared, as in "low_rank+int".
  """
  values = flat(config.to_mapping())
  schedule = config.sync.named.schedule
  values[_INTERVAL] = schedule.sync_interval
  values["sync.num_fragments"] = schedule.num_fragments
  # Fields that the gap does not state had their usual values in its runs.
  for path, usual in _USUAL.items():
    if path not in gap.settings and values[path] != usual:
      return False
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
  """Returns the config with another method and the fields of its recipe.

  The rank does not adapt, so all rounds cost the same. If the method averages
  in every step, the config's H and mailbox are dropped. Otherwise they stay.

  Args:
    config: Config to start from. Its sections `sync`, `exchange`, `adaptive`
      and `outer`, its inner optimizer and its momentum are replaced. All other
      fields stay.
    method: Name of the method.
    settings: Values in place of the recipe's, by dotted name. The config's H
      takes precedence over them. So does the rank of "dilocox", which follows
      from the model's width. None: the values of the recipe. If the config has
      this method already, None keeps all fields except `adaptive.mode`.

  Raises:
    ValueError: One line, if the method does not go with the config.
  """
  if method == config.sync.method_name and settings is None:
    return changed(config, {"adaptive.mode": "off"})
  changes: Changes = {"sync.method": method, "adaptive.mode": "off"}
  changes |= settings or {}
  if config.sync.sync_interval and method not in _EVERY_STEP:
    changes[_INTERVAL] = config.sync.sync_interval
  if method == "dilocox":
    rank = max(config.model.shape.model_dim // _WIDTH_PER_RANK, 1)
    changes["exchange.codec"] = f"low_rank(rank={rank})+int(bits=4)"
  values = config.to_mapping() | {section: {} for section in _METHOD_SECTIONS}
  if method in _EVERY_STEP:
    values["mailbox"] = {}
  elif config.uses_mailbox:
    changes["exchange.collective"] = MAILBOX
  # The recipe of the method chooses the inner optimizer.
  values["inner"] |= {"optimizer": None, "momentum": 0.0}
  return from_mapping(flat(values) | changes)


def _baseline(config: RunConfig) -> RunConfig:
  """Returns the config with AllReduce in float32, whatever its own codec is."""
  plain = dict.fromkeys(("exchange.codec", "exchange.feedback"))
  return changed(of_method(config, "allreduce"), plain)


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
  """Returns the stated bytes, else `least_memory` of the cluster."""
  if stated_bytes is not None:
    return stated_bytes
  return least_memory(cluster)


def layouts(config: RunConfig, num_devices: int) -> Iterator[Changes]:
  """Yields the layouts to try, i.e. ways to divide a replica among its devices.

  A layout is a number of data shards, of tensor shards (a power of two, at most
  8), of stages and of micro-batches. Some devices may stay idle. For example,
  78 layers on 80 devices may have 39 stages x 2 shards, or 32 x 2.

  With one stage, the config's `mesh.remat` and "full" are tried. With several
  stages, `mesh.remat` is "full". With several stages and several data shards,
  both values of `mesh.gather` are tried.

  Args:
    config: Config whose model and batch are divided.
    num_devices: Number of devices of one replica.

  Yields:
    Fields of a config that set the layout, by dotted name; {} for one device.
  """
  if num_devices == 1:
    yield {}
    return
  batch = config.data.batch_size
  # Tensor shards divide the heads of the queries, and those of keys and values.
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

  No stage may lack a device or a layer. Of the numbers that this allows, 1, the
  largest one, the largest divisor of the number of layers, and the largest
  power of two are tried.
  """
  num_layers = config.model.shape.num_layers
  most = min(num_devices, num_layers)
  even = max(n for n in range(1, most + 1) if num_layers % n == 0)
  power_of_two = 2 ** int(math.log2(most))
  return sorted({1, most, even, power_of_two})


def _remat_and_gather(
  config: RunConfig, num_data_shards: int, num_stages: int
) -> list[Changes]:
  """Returns the pairs of `mesh.remat` and `mesh.gather` that `layouts` tries.

  With one stage, only `mesh.remat` is set.
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
  """Returns the layouts that a method may need, fastest for AllReduce first.

  Layouts with which AllReduce does not fit are left out, because no method
  needs less memory. A layout is also left out if a faster layout on equally
  many devices needs no more memory. If AllReduce fits with no layout, the
  result is the layout that needs the least memory.
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
      # `step_s` does not contain the time to compute activations again. So of
      # equally fast layouts, the one that computes least again comes first.
      num_again = REMATS.index(divided.mesh.remat)
      timed.append((step_s, num_again, needed_bytes, layout))
  # The last entry, the layout, has no order.
  timed.sort(key=lambda entry: entry[:3])
  return _useful_layouts(timed)


def _useful_layouts(
  timed: Sequence[tuple[float, int, int, Changes]],
) -> list[Changes]:
  """Leaves out a layout if a faster one needs no more memory.

  Only layouts on equally many devices are compared.

  Args:
    timed: Layouts, the fastest first: seconds of a step, an order among equal
      durations, bytes of a device, and the layout.
  """
  useful: list[Changes] = []
  least_bytes: dict[int, int] = {}
  for _, _, needed_bytes, layout in timed:
    # A slower layout on more devices may be needed: other methods keep more
    # copies of the parameters than AllReduce. The devices of a replica share
    # these copies, so each device has less of them if there are more devices.
    num_devices = math.prod(layout.get(field, 1) for field in _COUNTS)
    # The first, fastest layout of a number of devices is always useful.
    if needed_bytes < least_bytes.get(num_devices, needed_bytes + 1):
      least_bytes[num_devices] = needed_bytes
      useful.append(layout)
  return useful


def _with_layout(
  config: RunConfig, candidate_layouts: Sequence[Changes], device_bytes: float
) -> RunConfig:
  """Returns the config with the first layout that leaves enough memory free.

  If there is none, the layout is the first that fits, else the one that needs
  the least memory.
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
