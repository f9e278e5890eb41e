"""Times collectives and methods over throttled links, and predicts the times.

The methods train a small model whose messages are large for the time of its
steps. The setting `ALONE`, over a link that is not throttled, gives about the
time of an inner step alone, because only one exchange follows 60 steps. From
this time the simulator predicts the time of a step in all other runs.
"""

import collections
import dataclasses
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dilocox_jax.config import from_mapping, to_plan
from dilocox_jax.distributed.link_counter import LINK_VARIABLE
from dilocox_jax.metrics.lines import write_json
from dilocox_jax.plan.operations import operation
from dilocox_jax.plan.schedule.methods import named_method
from dilocox_jax.report.run import LoadedRun, load_run
from dilocox_jax.simulate.cluster import Cluster, Link, Site
from dilocox_jax.simulate.gloo import GLOO
from dilocox_jax.simulate.transfer import Transport
from experiments.runtime import link_check, process_group
from experiments.runtime.command_line import StoppedError
from experiments.runtime.throttled_links import INTERFACE, throttled_network
from experiments.tables.runs import collective_s, pace

_MIB = 2**20
_PORT = 9876  # In a new network namespace every port is free.
_PLAIN = dataclasses.replace(GLOO, factors=())  # Gloo without a calibration.
_KINDS = tuple(kind for kind, *_ in GLOO.factors)
_COUNTS = (2, 4)  # Numbers of processes with which gloo is calibrated.
REPEATS = 5  # Measurements of a case, each of which may take seconds.
CALIBRATION_REPEATS = 12  # The same for a calibration.


class Case(NamedTuple):
  """A network, and the collectives that are timed on it.

  Attributes:
    rates_bps: Rate of the link of every node (bit/s).
    sizes_mib: Operand sizes (MiB), by kind of collective.
  """

  rates_bps: Sequence[float]
  sizes_mib: Mapping[str, Sequence[int]]


_SIZES = {"all_reduce": (1, 16), **dict.fromkeys(_KINDS[1:], (2,))}
CASES = (
  Case([1e8] * 2, _SIZES),
  Case([1e9] * 2, _SIZES),
  Case([1e8] * 4, _SIZES),
  Case([1e9] * 4, _SIZES),
  Case([1e8, 1e9, 1e9, 1e9], {"all_reduce": (1, 16)}),
)
QUICK_CASES = (Case([1e8] * 2, {"all_reduce": (2,), "all_gather": (2,)}),)

# The case `processes`: rates of the networks, and sizes of the collectives on
# each network (MiB).
PROCESS_RATES_BPS = (20e6, 50e6, 100e6, 200e6)
PROCESS_SIZES = {"all_reduce": (1, 4, 16), **dict.fromkeys(_KINDS[1:], (2,))}
_OPEN_BPS = 1e11  # Far more than this machine's cores carry.
# If a collective over open links takes more than this share of its time over
# throttled links, the cores may limit it as well as the links.
_CPU_SHARE = 0.2

RATES_BPS = (200e6, 50e6)  # Rates of the links over which methods train.
_COMPILING = 3  # Number of first segments, which compile and are not timed.
_SEGMENTS = 4  # Number of segments after those, which are timed.


class Setting(NamedTuple):
  """A method and its settings in a short run.

  Attributes:
    method: Name of the method.
    num_steps: Inner steps of a segment. A segment is a round, or if the method
      has no rounds, several data-parallel steps.
    changes: Other fields of the config, as "field=value".
  """

  method: str
  num_steps: int
  changes: tuple[str, ...] = ()


ALONE = Setting("diloco", 60)
SETTINGS = (
  Setting("allreduce", 4),
  Setting("diloco", 20),
  Setting("open_diloco", 20),
  Setting(
    "streaming_diloco", 20, ("sync.num_fragments=4", "sync.overlap_steps=10")
  ),
  Setting("cocktail_sgd", 10),
  Setting("dilocox", 20, ("exchange.codec=low_rank(rank=32)+int(bits=4)",)),
  Setting("overlap_loco", 20, ("sync.num_fragments=4",)),
)
# Fields of all settings. The model is wide and its batches are small. So
# messages are large beside gloo's own messages (about 1 kB an exchange, a few
# percent), although a step takes only as long as a step of `tiny`.
_COMMON = (
  "model.model_dim=256",
  "model.ff_dim=768",
  "data.batch_size=2",
  "data.sequence_length=32",
  "inner.optimizer=adamw",
  "inner.warmup_steps=1",
  "adaptive.mode=off",
  "evaluation.interval_steps=0",
  "evaluation.num_sequences=8",
  "checkpoint.interval_steps=1000000",
)


@dataclasses.dataclass(frozen=True)
class Row:
  """The predicted and the measured time of a collective or of a method's step.

  Attributes:
    links: The links, e.g. "2 x 100 Mbit/s".
    what: Kind and size of the collective, or name of the method.
    predicted_s: Time of the collective, or of a step with its exchanges, by the
      simulator (seconds).
    measured_s: The same time as measured (seconds).
    bytes_ratio: Bytes that the kernel counted divided by the predicted bytes.
    cpu_s: CPU time of all processes together (seconds), estimated as the time
      of the last process times the number of processes. None for a method.
    open_s: Time of the collective over links that are not throttled (seconds);
      None if it was not measured.
  """

  links: str
  what: str
  predicted_s: float
  measured_s: float
  bytes_ratio: float
  cpu_s: float | None = None
  open_s: float | None = None

  @property
  def is_bound_by_cpu(self) -> bool:
    """Whether the cores, and not only the links, limit the collective.

    They do if `open_s` is more than a fifth of `measured_s`. False if `open_s`
    was not measured.
    """
    return (
      self.open_s is not None and self.open_s > _CPU_SHARE * self.measured_s
    )


def cluster_of(rates_bps: Sequence[float]) -> Cluster:
  """Returns a simulated cluster of nodes with links of these rates (bit/s).

  A link has the same rate in both directions, and no delay.
  """
  counts = collections.Counter(rates_bps).items()
  name = ", ".join(f"{count} x {bps / 1e6:g} Mbit/s" for bps, count in counts)
  sites = []
  for number, bps in enumerate(rates_bps):
    link = Link(up_bps=bps, down_bps=bps, rtt_s=0.0)
    sites.append(Site(f"node{number}", link))
  return Cluster(name, tuple(sites))


def run_cases(
  cases: Iterable[Case],
  transport: Transport,
  folder: pathlib.Path,
  repeats: int = REPEATS,
) -> Iterator[Row]:
  """Times collectives over throttled links, and yields a row for each.

  Each collective is measured `repeats` times. The simulator predicts its time
  with `transport`. `folder` is for intermediate files.

  Raises:
    UsageError: If this machine or user may not throttle links.
    StoppedError: If a process fails.
  """
  for case in cases:
    cluster = cluster_of(case.rates_bps)
    collectives = [
      (kind, size_mib * _MIB)
      for kind, sizes_mib in case.sizes_mib.items()
      for size_mib in sizes_mib
    ]
    measurements = _measured(cluster, collectives, folder, repeats)
    for (kind, num_bytes), (seconds, sent_bytes, cpu_s) in zip(
      collectives, measurements, strict=True
    ):
      collective = operation(kind, num_bytes)
      planned_bytes = collective.sent_bytes(cluster.num_replicas)
      yield Row(
        links=cluster.name,
        what=f"{kind} of {num_bytes // _MIB} MiB",
        predicted_s=collective_s(cluster, transport, collective),
        measured_s=seconds,
        bytes_ratio=sent_bytes / planned_bytes,
        cpu_s=cpu_s * cluster.num_replicas,
      )


def run_processes(counts: Iterable[int], folder: pathlib.Path) -> Iterator[Row]:
  """Times collectives at several rates, and over links that are not throttled.

  Yields a row for each number of processes in `counts`, each rate and each
  collective. A row has the time over throttled links, and the time over links
  that are not throttled. The predictions use `GLOO` as it is, without a
  calibration on this machine. `folder` is for intermediate files.

  Raises:
    UsageError: If this machine or user may not throttle links.
    StoppedError: If a process fails.
  """
  for count in counts:
    open_case = Case([_OPEN_BPS] * count, PROCESS_SIZES)
    open_rows = list(run_cases([open_case], GLOO, folder))
    for rate_bps in PROCESS_RATES_BPS:
      case = Case([rate_bps] * count, PROCESS_SIZES)
      rows = run_cases([case], GLOO, folder)
      for row, open_row in zip(rows, open_rows, strict=True):
        yield dataclasses.replace(row, open_s=open_row.measured_s)


def _measured(
  cluster: Cluster,
  collectives: Sequence[tuple[str, int]],
  folder: pathlib.Path,
  repeats: int,
) -> list[tuple[float, float, float]]:
  """Times collectives over the throttled links of one network.

  Returns:
    For each collective, means of the middle half of the repeats: its duration
    (seconds), the bytes that the last node sent, and the CPU time of that
    node's process (seconds).

  Raises:
    UsageError: If this machine or user may not throttle links.
    StoppedError: If a process fails.
  """
  request_path = folder / "asked.json"
  result_path = folder / "measured.json"
  write_json(request_path, collectives)
  result_path.unlink(missing_ok=True)  # Of an earlier measurement.
  count = cluster.num_replicas
  environment = process_group.environment(count) | {LINK_VARIABLE: INTERFACE}
  module = [sys.executable, "-m", "experiments.tools.link_collectives"]
  with throttled_network([site.link for site in cluster.sites]) as network:
    # Nothing throttles open links, so there is no rate to check.
    if cluster.sites[0].link.up_bps < _OPEN_BPS:
      link_check.check(network)
    members = []
    for node in range(count):
      arguments = [
        f"{network.addresses[0]}:{_PORT}",
        str(count),
        str(node),
        str(repeats),
        str(request_path),
        str(result_path),
      ]
      command = network.command(node, [*module, *arguments])
      members.append(process_group.Member(node, command, environment))
    failure = process_group.run_together(members)
    if failure:
      raise StoppedError(failure.reason, failure.exit_code)
  return json.loads(result_path.read_text())


def calibrated(
  folder: pathlib.Path, repeats: int = CALIBRATION_REPEATS
) -> Transport:
  """Measures how slow gloo is on this machine, among two and four processes.

  Each collective is measured `repeats` times. `folder` is for intermediate
  files.

  Returns:
    Gloo with a factor for every kind of collective and number of processes: the
    measured time divided by the time that the simulator gives without factors.

  Raises:
    UsageError: If this machine or user may not throttle links.
    StoppedError: If a process fails.
  """
  # No case that is predicted with these factors has these sizes and rates.
  sizes = dict.fromkeys(_KINDS, (3,))
  factors: dict[str, list[tuple[int, float]]] = {kind: [] for kind in _KINDS}
  for count in _COUNTS:
    case = Case([60e6] * count, sizes)
    rows = run_cases([case], _PLAIN, folder, repeats)
    for kind, row in zip(_KINDS, rows, strict=True):
      factors[kind].append((count, row.measured_s / row.predicted_s))
  return dataclasses.replace(
    GLOO,
    factors=tuple(
      (kind, tuple(by_count)) for kind, by_count in factors.items()
    ),
  )


def run_methods(transport: Transport, folder: pathlib.Path) -> Iterator[Row]:
  """Trains methods over links of two rates, and yields the times of a step.

  There is a row for each rate and setting, with the measured time and the time
  that the simulator predicts with `transport`. Both times include exchanges.
  The runs are in `folder`.

  Raises:
    StoppedError: If a run fails.
  """
  alone_s, _ = measured_step(_train(ALONE, folder / "alone"))
  for rate_bps, setting in itertools.product(RATES_BPS, SETTINGS):
    rate = f"{rate_bps / 1e6:g} Mbit/s"
    workdir = folder / f"{setting.method}_{rate_bps / 1e6:.0f}mbit"
    run = _train(setting, workdir, link=rate)
    step_s, bytes_ratio = measured_step(run)
    yield Row(
      links=f"2 x {rate}",
      what=setting.method,
      predicted_s=predicted_step_s(run.config, rate_bps, transport, alone_s),
      measured_s=step_s,
      bytes_ratio=bytes_ratio,
    )


def flags_of(setting: Setting, workdir: pathlib.Path) -> list[str]:
  """Returns the flags of `experiments.train` for a short run."""
  length_field = "sync_interval"
  if named_method(setting.method).exchanged == "gradient":
    length_field = "steps_per_dispatch"
  total_steps = setting.num_steps * (_COMPILING + _SEGMENTS)
  fields = [
    *_COMMON,
    f"sync.method={setting.method}",
    f"sync.{length_field}={setting.num_steps}",
    f"total_steps={total_steps}",
    *setting.changes,
  ]
  return [f"--workdir={workdir}", *(f"--config.{field}" for field in fields)]


def _train(
  setting: Setting, workdir: pathlib.Path, link: str = ""
) -> LoadedRun:
  """Trains a short run with two processes, and returns it.

  `link` is the rate of their links, e.g. "50 Mbit/s"; "" for the loopback
  interface. Raises StoppedError if the run fails.
  """
  command = [sys.executable, "-m", "experiments.launch", "--processes=2"]
  if link:
    command.append(f"--link={link}")
  process = subprocess.run([*command, *flags_of(setting, workdir)])
  if process.returncode:
    raise StoppedError(
      f"{setting.method} failed (see above)", process.returncode
    )
  return load_run(workdir)


def measured_step(run: LoadedRun) -> tuple[float, float]:
  """Returns a run's time of a step, and its ratio of sent to predicted bytes.

  The first three segments are left out, because programs were compiled in them.
  A segment is a round, or several data-parallel steps.

  Returns:
    Median time of a step with its exchanges (seconds), and the bytes that
    passed the link divided by the predicted bytes.
  """
  timings = [row for row in run.timings if row.event == "round"][_COMPILING:]
  ends = [row.step for row in run.rounds]
  lengths = np.diff([0, *ends]).tolist()[_COMPILING:]
  step_times_s = [
    timing.wall_s / num_steps
    for timing, num_steps in zip(timings, lengths, strict=True)
  ]
  planned_bytes = sum(row.sent_bytes for row in run.rounds[_COMPILING:])
  link_bytes = sum(timing.link_bytes for timing in timings)
  return statistics.median(step_times_s), link_bytes / planned_bytes


def predicted_step_s(
  config: dict, rate_bps: float, transport: Transport, step_s: float
) -> float:
  """Returns the simulated time of a step with its exchanges (seconds).

  Args:
    config: Config of a run of two replicas, as its config.json has it.
    rate_bps: Rate of each replica's link (bit/s).
    transport: How the communication library sends messages.
    step_s: Time of an inner step alone (seconds).
  """
  traffic = to_plan.traffic(from_mapping(config))
  cluster = cluster_of([rate_bps] * 2)
  return pace(traffic, cluster, step_s, transport=transport).step_s
