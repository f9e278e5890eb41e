"""What training by each method would cost on given clusters, and what fits.

A plan is a method's recipe with the model and the batch of a config, and a
division of each replica among its devices: the fastest one that fits. Nothing
is searched beside the division, and nothing is said about losses.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dilocox_jax.api.device_memory import DeviceMemory, device_memory
from dilocox_jax.api.simulation_setup import Options, Setup, set_up
from dilocox_jax.checks import flat, require
from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.plan.collective import MAILBOX
from dilocox_jax.plan.schedule.methods import METHODS
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.cluster_file import load_cluster
from dilocox_jax.simulate.steps import SteadyState, steady_state

# Sections that belong to the method; those of another method do not apply.
_OF_METHOD = ("sync", "exchange", "adaptive", "outer")
_EVERY_STEP = ("allreduce", "cocktail_sgd")
_RANK_SHARE = 8  # The recipe has rank 16 for a model of width 128.

_DERIVED = Options()

Changes = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class MethodPlan:
  """One way to train, and what it costs.

  Attributes:
    config: Config of the run.
    setup: The run on the cluster, ready to be timed.
    rounds: Costs of rounds in the middle of a long run (simulated).
    memory: Memory of a device (its state derived, the rest estimated).
    device_bytes: Memory that each device has (bytes); infinity: not known.
    allreduce_tokens_per_s: What AllReduce would make on the same links.
  """

  config: RunConfig
  setup: Setup
  rounds: SteadyState
  memory: DeviceMemory
  device_bytes: float
  allreduce_tokens_per_s: float = math.nan

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
    """Why the plan is ruled out; "" if it is not."""
    if self.fits:
      return ""
    needed, has = self.memory.total / 1e9, self.device_bytes / 1e9
    return f"a device needs {needed:.3g} GB and has {has:.3g} GB"


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
  own = _plan(config, cluster, options, device_bytes)
  every_step = of_method(config, "allreduce")
  base = _plan(every_step, cluster, options, device_bytes)
  return dataclasses.replace(own, allreduce_tokens_per_s=base.tokens_per_s)


def compare_methods(
  config: RunConfig,
  cluster: str,
  options: Options = _DERIVED,
  device_bytes: float | None = None,
) -> tuple[list[MethodPlan], dict[str, str]]:
  """Compares every method's recipe on the links of a cluster.

  Args:
    config: Config with the model, the batch of a replica and the inner
      optimizer's settings. Its own method keeps all that it says; the others
      have their recipe, with its H, and its rank if it has one.
    cluster: Name of a cluster preset, or path of a cluster file.
    options: What config and cluster leave open. Where a step's duration is
      stated, it is that of the config's mesh, and no other is tried.
    device_bytes: Memory of a device; None: that of the cluster.

  Returns:
    Plans, those that fit first and the fastest first among them, and of those
    whose speeds agree in three digits the one that sends least. And for each
    method that does not go with the config, the reason.

  Raises:
    ValueError: If config and cluster do not fit.
  """
  placed = load_cluster(cluster, config.mesh.num_replicas)
  has = _device_bytes(placed, device_bytes)
  base, ways = of_method(config, "allreduce"), [{}]
  if options.step_s is None:
    ways = _fastest_layouts(base, cluster, options, has)
  plans, refused = [], {}
  for method in METHODS:
    try:
      divided = _divided(of_method(config, method), ways, has)
      plans.append(_plan(divided, cluster, options, has))
    except ValueError as error:
      refused[method] = str(error)
  speeds = {plan.config.sync.method: plan.tokens_per_s for plan in plans}
  require("allreduce" in speeds, refused.get("allreduce", ""))
  speed = speeds["allreduce"]
  plans = [dataclasses.replace(p, allreduce_tokens_per_s=speed) for p in plans]
  plans.sort(key=lambda p: p.bytes_per_day)
  plans.sort(key=lambda p: (not p.fits, -float(f"{p.tokens_per_s:.3g}")))
  return plans, refused


def of_method(config: RunConfig, method: str) -> RunConfig:
  """Returns the config with another method's recipe; its own stays as it is.

  Args:
    config: Config whose model, data and optimizer's settings stay.
    method: Name of the method.
  """
  if method == config.sync.method_name:
    return changed(config, {"adaptive.mode": "off"})
  changes: Changes = {"sync.method": method, "adaptive.mode": "off"}
  if config.sync.sync_interval and method not in _EVERY_STEP:
    changes["sync.sync_interval"] = config.sync.sync_interval
  if method == "dilocox":
    rank = max(config.model.shape.model_dim // _RANK_SHARE, 1)
    changes["exchange.codec"] = f"low_rank(rank={rank})+int(bits=4)"
  values = config.to_mapping() | {section: {} for section in _OF_METHOD}
  if method in _EVERY_STEP:
    values["meet"] = {}
  elif config.meets:  # So do all methods that can.
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
  config: RunConfig, cluster: str, options: Options, device_bytes: float | None
) -> MethodPlan:
  setup = set_up(config, cluster, options)
  rounds = steady_state(setup.link_costs, setup.work, setup.script, setup.plan)
  has = _device_bytes(setup.link_costs.cluster, device_bytes)
  return MethodPlan(config, setup, rounds, device_memory(config), has)


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
  base: RunConfig, cluster: str, options: Options, device_bytes: float
) -> list[Changes]:
  """Returns the layouts that fit, the fastest first; else the smallest.

  AllReduce keeps the least of all methods, so what is too small for it is too
  small for the others.

  Args:
    base: Config of AllReduce.
    cluster: Name of a cluster preset, or path of a cluster file.
    options: What config and cluster leave open.
    device_bytes: Memory of a device.
  """
  placed = load_cluster(cluster, base.mesh.num_replicas)
  devices = min(map(placed.num_devices, range(placed.num_replicas)))
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
  """Returns the config with the first layout that fits, else the smallest."""
  divided = [changed(config, way) if way else config for way in ways]
  needed = [device_memory(one).total for one in divided]
  fitting = (n for n, size in enumerate(needed) if size <= device_bytes)
  return divided[next(fitting, needed.index(min(needed)))]
