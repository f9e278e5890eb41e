"""Finds the settings that train fastest on given clusters, within a tolerance.

Every candidate is priced by the simulator in a steady state, its memory is
estimated, and its loss is expected from this repository's sweeps. Division of
a replica and method are independent: the division decides how long a step takes
and what fits, the method how long the steps wait. So the fastest division that
fits is found for each method, and thousands of pairs take seconds.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

from dilocox_jax.api.candidates import (
  Changes,
  at_interval,
  changed,
  families,
  layouts,
)
from dilocox_jax.api.device_memory import (
  DeviceMemory,
  device_memory,
  factor_bytes,
  num_copies,
  share_bytes,
  step_bytes,
)
from dilocox_jax.api.expected_gap import ExpectedGap, expected_gap
from dilocox_jax.api.simulation_setup import Options, set_up
from dilocox_jax.config import RunConfig
from dilocox_jax.report.units import human_share, human_time
from dilocox_jax.simulate.presets import load_cluster
from dilocox_jax.simulate.steady_state import SteadyState, steady_state

# Speeds that differ by less than this are equal, and the smaller gap wins.
_SAME_SPEED = 0.005


@dataclasses.dataclass(frozen=True)
class Limits:
  """What a proposal has to keep.

  Attributes:
    gap_percent: Largest expected gap to AllReduce with the same inner
      optimizer (per cent).
    device_bytes: Memory of a device (bytes).
    bytes_per_day: Bytes that one replica may send in a day.
  """

  gap_percent: float = 3.0
  device_bytes: float = math.inf
  bytes_per_day: float = math.inf


@dataclasses.dataclass(frozen=True)
class Proposal:
  """One way to train, and what it is expected to cost.

  Attributes:
    changes: Fields of the config that it sets, by dotted names.
    config: The whole config.
    rounds: Costs of rounds in the middle of a run (simulated).
    memory: Memory of a device (its state derived, the rest estimated).
    gap: Expected gap to AllReduce; None if nothing like it was measured.
    against: Why it is not to be taken, "" if it may be.
  """

  changes: Changes
  config: RunConfig
  rounds: SteadyState
  memory: DeviceMemory
  gap: ExpectedGap | None
  against: str = ""

  @property
  def tokens_per_s(self) -> float:
    """Tokens of all replicas together (tokens per second)."""
    steps_per_s = self.rounds.replica_steps / self.rounds.step_s
    return steps_per_s * self.config.tokens_per_replica_step

  @property
  def bytes_per_day(self) -> float:
    """Bytes that one replica sends in a day."""
    return self.rounds.sent_bytes / self.rounds.step_s * 86_400

  def hours(self, tokens: float) -> float:
    """Returns the time to train on some tokens (hours)."""
    return tokens / self.tokens_per_s / 3600


@dataclasses.dataclass(frozen=True)
class _Division:
  """A division of a replica among its devices, and what it decides.

  Attributes:
    changes: Fields that make it.
    config: A config with it.
    step_s: Duration of an inner step of the slowest replica (seconds).
    step_bytes: Memory of a device that a step needs (bytes), with any inner
      optimizer but Muon, and with Muon.
    shares_bytes: Share of a copy of the parameters that a device keeps, with
      several fragments and with one (bytes).
  """

  changes: Changes
  config: RunConfig
  step_s: float
  step_bytes: tuple[int, int]
  shares_bytes: tuple[int, int]

  def memory_bytes(self, config: RunConfig) -> float:
    """Returns the memory of a device under a config's method (bytes)."""
    is_whole = config.fragments.num_fragments == 1
    state = num_copies(config) * self.shares_bytes[is_whole]
    mine = self.config
    factors = factor_bytes(
      mine.model.shape, mine.division, config.codec.payload
    )
    is_muon = config.inner.optimizer == "muon"
    return state + factors + self.step_bytes[is_muon]


@dataclasses.dataclass(frozen=True)
class Advice:
  """All proposals, the best first; those with an objection come last.

  Attributes:
    given: The config that was asked about, as it is.
    proposals: Proposals in order.
    num_compared: Pairs of a division and a method that were looked at.
  """

  given: Proposal
  proposals: Sequence[Proposal]
  num_compared: int

  @property
  def best(self) -> Proposal | None:
    """The proposal to take; None if none meets the conditions."""
    first = self.proposals[0] if self.proposals else None
    return first if first and not first.against else None

  @functools.cached_property
  def by_method(self) -> tuple[Proposal, ...]:
    """The best proposal of each method, in order."""
    first: dict[str, Proposal] = {}
    for proposal in self.proposals:
      first.setdefault(proposal.config.sync.method, proposal)
    return tuple(first.values())

  @functools.cached_property
  def pareto(self) -> tuple[Proposal, ...]:
    """Proposals that fit and that no other beats in speed and in gap."""
    fitting = [p for p in self.proposals if p.gap and "device" not in p.against]
    fitting.sort(key=lambda p: (-p.tokens_per_s, _gap(p)))
    front: list[Proposal] = []
    for proposal in fitting:
      if not front or _gap(proposal) < _gap(front[-1]):
        front.append(proposal)
    return tuple(front)

  def reason(self, proposal: Proposal) -> str:
    """Says in one line why a proposal is not the best."""
    best = self.best
    if proposal.against or best is None or proposal is best:
      return proposal.against
    slower = 1 - proposal.tokens_per_s / best.tokens_per_s
    if slower > _SAME_SPEED:
      waits_s = proposal.rounds.step_s - proposal.rounds.compute_s
      return (
        f"{human_share(slower)} slower: a step waits {human_time(waits_s)} for "
        "the link"
      )
    gaps = f"{_gap(proposal):.1f} % instead of {_gap(best):.1f} %"
    return f"as fast, but a gap of {gaps}"


def advise(
  config: RunConfig,
  cluster: str,
  *,
  limits: Limits = Limits(),
  step_s: float | None = None,
  on_progress: Callable[[int, int], None] | None = None,
) -> Advice:
  """Compares methods, schedules, codecs and divisions of a replica.

  Args:
    config: Config with the model, the batch of a replica and the inner
      optimizer's settings. What it says of the method, its codec and its outer
      optimizer is not read.
    cluster: Name of a cluster preset, or path of a cluster file.
    limits: What a proposal has to keep.
    step_s: Duration of an inner step (seconds), for the division that the
      config has; None derives it and compares divisions.
    on_progress: Called with the number of settings done and of all.

  Returns:
    `best`, the proposal to take; `proposals` in order and `reason(proposal)`,
    why one is not the best; `by_method`, the best of each method; `pareto`,
    those that no other beats in speed and in gap; `given`, the config as it is.

  Raises:
    ValueError: If config and cluster do not fit.
  """
  options = Options(step_s=step_s)
  divisions = _divisions(config, cluster, options)
  listed = list(families(config))
  proposals: list[Proposal] = []
  for done, (changes, intervals) in enumerate(listed):
    if on_progress:
      on_progress(done, len(listed))
    for schedule in _intervals(divisions, changes, intervals, cluster, options):
      found = _fastest(divisions, schedule, cluster, options, limits)
      if found is not None:
        proposals.append(_judged(found, limits))
  if on_progress:
    on_progress(len(listed), len(listed))
  proposals.sort(key=_order(proposals))
  given = _judged(_proposal({}, config, cluster, options), limits)
  return Advice(given, proposals, len(proposals) * len(divisions))


def _divisions(
  config: RunConfig, cluster: str, options: Options
) -> list[_Division]:
  """Returns the divisions of a replica, the fastest first."""
  placed = load_cluster(cluster, config.mesh.num_replicas)
  devices = min(map(placed.num_devices, range(placed.num_replicas)))
  is_timed = options.step_s is not None
  ways = [{}] if is_timed else layouts(config, devices)
  divided = [(way, changed(config, way) if way else config) for way in ways]
  found = [_division(way, one, cluster, options) for way, one in divided if one]
  if not found:
    raise ValueError(
      f"no division of {devices} devices goes with data.batch_size="
      f"{config.data.batch_size}: take a multiple of {devices}"
    )
  return sorted(found, key=lambda division: division.step_s)


def _division(
  changes: Changes, config: RunConfig, cluster: str, options: Options
) -> _Division:
  step_s = float(max(set_up(config, cluster, options).work.step_s))
  shape, in_order = config.model.shape, config.stage_layers.is_in_order
  shares = [
    share_bytes(
      shape, dataclasses.replace(config.division, layers_on_stages=keeps)
    )
    for keeps in (False, in_order)
  ]
  steps = step_bytes(config, "adamw"), step_bytes(config, "muon")
  return _Division(changes, config, step_s, steps, (shares[0], shares[1]))


def _intervals(
  divisions: Sequence[_Division],
  changes: Changes,
  intervals: Sequence[int],
  cluster: str,
  options: Options,
) -> Iterator[Changes]:
  """Yields a family with every H, that which hides its exchanges included."""
  if not intervals:
    yield changes
    return
  longest = at_interval(changes, intervals[-1])
  found = _fastest(divisions[:1], longest, cluster, options, Limits())
  if found is None:
    return
  least = found.rounds.hiding_interval(intervals[-1])
  # Slices are sent at equal distances if H is a multiple of their number.
  slices = found.config.sync.num_fragments or 1
  hiding = {least, -(-least // slices) * slices}
  for interval in sorted(
    {h for h in hiding if h > intervals[0]} | {*intervals}
  ):
    yield at_interval(changes, interval)


def _fastest(
  divisions: Sequence[_Division],
  changes: Changes,
  cluster: str,
  options: Options,
  limits: Limits,
) -> Proposal | None:
  """Returns a setting with the fastest division that fits, else the smallest.

  None if the setting and the model do not go together.
  """
  first = changed(divisions[0].config, changes)
  if first is None:
    return None
  sizes = [division.memory_bytes(first) for division in divisions]
  fitting = [n for n, size in enumerate(sizes) if size <= limits.device_bytes]
  best = fitting[0] if fitting else sizes.index(min(sizes))
  settings = divisions[best].changes | changes
  config = changed(divisions[best].config, changes) if best else first
  if config is None:
    return None
  return _proposal(settings, config, cluster, options)


def _proposal(
  changes: Changes, config: RunConfig, cluster: str, options: Options
) -> Proposal:
  setup = set_up(config, cluster, options)
  rounds = steady_state(setup.link_costs, setup.work, setup.script, setup.plan)
  memory = device_memory(config)
  return Proposal(changes, config, rounds, memory, expected_gap(config))


def _judged(proposal: Proposal, limits: Limits) -> Proposal:
  objection = _objection(proposal, limits)
  return dataclasses.replace(proposal, against=objection)


def _objection(proposal: Proposal, limits: Limits) -> str:
  gap, needed = proposal.gap, proposal.memory.total
  if needed > limits.device_bytes:
    return (
      f"a device needs {needed / 1e9:.3g} GB and has "
      f"{limits.device_bytes / 1e9:.3g}"
    )
  if gap is None:
    return "nothing like it was measured"
  if gap.percent > limits.gap_percent:
    return f"a gap of {gap.percent:.1f} % is expected"
  if proposal.bytes_per_day > limits.bytes_per_day:
    return f"it sends {proposal.bytes_per_day / 1e9:,.4g} GB a day"
  return ""


def _gap(proposal: Proposal) -> float:
  return proposal.gap.percent if proposal.gap else float("inf")


def _order(proposals: Sequence[Proposal]):
  allowed = [p.tokens_per_s for p in proposals if not p.against]
  fastest = max(allowed, default=0.0)

  def key(proposal: Proposal):
    speed = proposal.tokens_per_s
    is_slower = speed < (1 - _SAME_SPEED) * fastest
    rank = -speed if is_slower or proposal.against else -fastest
    return bool(proposal.against), rank, _gap(proposal), -speed

  return key
