"""Collectives and methods over throttled links, beside the simulator's seconds.

DiLoCoX (arXiv 2506.21263) reports tokens a second of several methods over
1 Gbit/s. Here the same methods train a small model for which AllReduce is bound
by the link. The simulator is told the seconds of a step of `ALONE`, which sends
every 60 steps over a link that is not throttled, and predicts the others.
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
_PORT = 9876
_PLAIN = dataclasses.replace(GLOO, factors=())  # Before it is calibrated.
_KINDS = tuple(kind for kind, *_ in GLOO.factors)
_COUNTS = (2, 4)  # Of processes, when gloo is calibrated.
REPEATS = 5  # Of a case, which may take seconds.
CALIBRATION_REPEATS = 12
# Rates of the nodes (bits per second), and MiB of the collectives by kind.
Case = tuple[Sequence[float], Mapping[str, Sequence[int]]]
_SIZES = {"all_reduce": (1, 16), **dict.fromkeys(_KINDS[1:], (2,))}
CASES: Sequence[Case] = (
  ([1e8] * 2, _SIZES),
  ([1e9] * 2, _SIZES),
  ([1e8] * 4, _SIZES),
  ([1e9] * 4, _SIZES),
  ([1e8, 1e9, 1e9, 1e9], {"all_reduce": (1, 16)}),
)
QUICK_CASES: Sequence[Case] = (
  ([1e8] * 2, {"all_reduce": (2,), "all_gather": (2,)}),
)

# Networks of equal links, each with these sizes, for any number of processes.
PROCESS_RATES_BPS = (20e6, 50e6, 100e6, 200e6)
PROCESS_SIZES = {"all_reduce": (1, 4, 16), **dict.fromkeys(_KINDS[1:], (2,))}
_OPEN_BPS = 1e11  # Far more than this machine's cores carry.
# A collective that takes more than this share of its time over open links is
# bound by the cores. Over its links it might wait for them.
_CPU_SHARE = 0.2

RATES_BPS = (200e6, 50e6)
_COMPILING = 3  # First segments of a run, which are not counted.
_SEGMENTS = 4
# Name of a method, inner steps of a segment, and changed fields. A segment is a
# round, or some steps of a method that has no rounds.
Setting = tuple[str, int, tuple[str, ...]]
ALONE: Setting = ("diloco", 60, ())
SETTINGS: tuple[Setting, ...] = (
  ("allreduce", 4, ()),
  ("diloco", 20, ()),
  ("open_diloco", 20, ()),
  ("streaming_diloco", 20, ("sync.num_fragments=4", "sync.overlap_steps=10")),
  ("cocktail_sgd", 10, ()),
  ("dilocox", 20, ("exchange.codec=low_rank(rank=32)+int(bits=4)",)),
  ("overlap_loco", 20, ("sync.num_fragments=4",)),
)
# Messages are so large that gloo's own, about 1 kB an exchange, are a few
# percent of them, though a step takes as long as one of `tiny`.
_COMMON = (
  *("model.model_dim=256", "model.ff_dim=768", "data.batch_size=2"),
  *("data.sequence_length=32", "inner.optimizer=adamw"),
  *("inner.warmup_steps=1", "adaptive.mode=off"),
  *("evaluation.interval_steps=0", "evaluation.num_sequences=8"),
  "checkpoint.interval_steps=1000000",
)


@dataclasses.dataclass(frozen=True)
class Row:
  """A collective, or a step of a method, on real links beside its prediction.

  Attributes:
    links: The links, e.g. "2 x 100 Mbit/s".
    what: Kind and size of the collective, or name of the method.
    predicted_s: Seconds by the simulator; of a step with its exchanges.
    measured_s: Measured seconds.
    bytes_ratio: Bytes that the kernel counted over those of the plan.
    cpu_s: CPU seconds of all processes together; None of a method.
    open_s: Seconds over open links, where the cores of the machine are what is
      slow; None if that was not measured.
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
    """Whether open links, and thus the cores, explain much of the time."""
    return (
      self.open_s is not None and self.open_s > _CPU_SHARE * self.measured_s
    )


def cluster_of(rates_bps: Sequence[float]) -> Cluster:
  """Returns a cluster of nodes with equal rates up and down, without delay."""
  counts = collections.Counter(rates_bps).items()
  name = ", ".join(f"{count} x {bps / 1e6:g} Mbit/s" for bps, count in counts)
  links = [Link(bps, bps, rtt_s=0.0) for bps in rates_bps]
  return Cluster(name, tuple(Site(f"node{n}", x) for n, x in enumerate(links)))


def run_cases(
  cases: Iterable[Case],
  transport: Transport,
  folder: pathlib.Path,
  repeats: int = REPEATS,
) -> Iterator[Row]:
  """Runs collectives over real links, one network after the other.

  Args:
    cases: Networks, each with its collectives.
    transport: Transport of the predictions.
    folder: Directory for files.
    repeats: How often each is measured.
  """
  for rates_bps, sizes in cases:
    cluster = cluster_of(rates_bps)
    asked = [(kind, n * _MIB) for kind, each in sizes.items() for n in each]
    found = _measured(cluster, asked, folder, repeats)
    for (kind, size), (seconds, sent, cpu_s) in zip(asked, found, strict=True):
      collective = operation(kind, size)
      yield Row(
        links=cluster.name,
        what=f"{kind} of {size // _MIB} MiB",
        predicted_s=collective_s(cluster, transport, collective),
        measured_s=seconds,
        bytes_ratio=sent / collective.sent_bytes(cluster.num_replicas),
        cpu_s=cpu_s * cluster.num_replicas,
      )


def run_processes(counts: Iterable[int], folder: pathlib.Path) -> Iterator[Row]:
  """Runs collectives among several numbers of processes, at several rates.

  The predictions are those of `GLOO`, for which nothing is measured first.

  Args:
    counts: Numbers of processes.
    folder: Directory for files.
  """
  for count in counts:
    open_case = [_OPEN_BPS] * count, PROCESS_SIZES
    open_rows = list(run_cases([open_case], GLOO, folder))
    for rate_bps in PROCESS_RATES_BPS:
      case = [rate_bps] * count, PROCESS_SIZES
      rows = run_cases([case], GLOO, folder)
      for row, open_row in zip(rows, open_rows, strict=True):
        yield dataclasses.replace(row, open_s=open_row.measured_s)


def _measured(
  cluster: Cluster,
  asked: Sequence[tuple[str, int]],
  folder: pathlib.Path,
  repeats: int,
) -> list[tuple[float, float, float]]:
  """Returns seconds, bytes on a node's link and its CPU seconds, of each."""
  asks, result = folder / "asked.json", folder / "measured.json"
  write_json(asks, asked)
  result.unlink(missing_ok=True)  # Of an earlier measurement.
  count = cluster.num_replicas
  environment = process_group.environment(count) | {LINK_VARIABLE: INTERFACE}
  module = [sys.executable, "-m", "experiments.tools.link_collectives"]
  with throttled_network([site.link for site in cluster.sites]) as network:
    if cluster.sites[0].link.up_bps < _OPEN_BPS:
      link_check.check(network)
    place = [f"{network.addresses[0]}:{_PORT}", str(count)]
    members = []
    for node in range(count):
      own = [*place, str(node), str(repeats), str(asks), str(result)]
      command = network.command(node, [*module, *own])
      members.append(process_group.Member(node, command, environment))
    if failure := process_group.run_together(members):
      raise StoppedError(failure.reason, failure.exit_code)
  return json.loads(result.read_text())


def calibrated(
  folder: pathlib.Path, repeats: int = CALIBRATION_REPEATS
) -> Transport:
  """Measures what gloo costs here by kind, between two and among four.

  The sizes and rates differ from those of all cases.

  Args:
    folder: Directory for files.
    repeats: How often each is measured.
  """
  sizes = dict.fromkeys(_KINDS, (3,))
  cases = [([60e6] * count, sizes) for count in _COUNTS]
  ratios = [
    row.measured_s / row.predicted_s
    for row in run_cases(cases, _PLAIN, folder, repeats)
  ]
  factors = {
    kind: tuple(zip(_COUNTS, ratios[place :: len(_KINDS)], strict=True))
    for place, kind in enumerate(_KINDS)
  }
  return dataclasses.replace(GLOO, factors=tuple(factors.items()))


def run_methods(transport: Transport, folder: pathlib.Path) -> Iterator[Row]:
  """Trains every setting over all links.

  Args:
    transport: Transport of the predictions.
    folder: Directory for the runs.
  """
  alone_s, _ = measured(_train(ALONE, folder / "alone"))
  for rate_bps, setting in itertools.product(RATES_BPS, SETTINGS):
    rate = f"{rate_bps / 1e6:g} Mbit/s"
    path = folder / f"{setting[0]}_{rate_bps / 1e6:.0f}mbit"
    run = _train(setting, path, f"--link={rate}")
    expected_s = predicted(run.config, rate_bps, transport, alone_s)
    yield Row(f"2 x {rate}", setting[0], expected_s, *measured(run))


def flags_of(setting: Setting, workdir: pathlib.Path) -> list[str]:
  """Returns the flags of `experiments.train` for a short run."""
  method, interval, changes = setting
  has_rounds = named_method(method).exchanged != "gradient"
  field = "sync_interval" if has_rounds else "steps_per_dispatch"
  steps = f"total_steps={interval * (_COMPILING + _SEGMENTS)}"
  own = f"sync.method={method}", f"sync.{field}={interval}", steps
  fields = [f"--config.{field}" for field in (*_COMMON, *own, *changes)]
  return [f"--workdir={workdir}", *fields]


def _train(setting: Setting, workdir: pathlib.Path, *link: str) -> LoadedRun:
  """Trains with two processes; without a link they use the loopback."""
  launch = [sys.executable, "-m", "experiments.launch", "--processes=2", *link]
  done = subprocess.run([*launch, *flags_of(setting, workdir)])
  if done.returncode:
    raise StoppedError(f"{setting[0]} failed (see above)", done.returncode)
  return load_run(workdir)


def measured(run: LoadedRun) -> tuple[float, float]:
  """Returns seconds of a step (median), and bytes on the link over the plan's.

  Args:
    run: A finished run, whose first segments compiled.
  """
  timings = [row for row in run.timings if row.event == "round"][_COMPILING:]
  ends = [row.step for row in run.rounds]
  lengths = np.diff([0, *ends]).tolist()[_COMPILING:]
  seconds = [t.wall_s / n for t, n in zip(timings, lengths, strict=True)]
  planned = sum(row.sent_bytes for row in run.rounds[_COMPILING:])
  on_link = sum(timing.link_bytes for timing in timings)
  return statistics.median(seconds), on_link / planned


def predicted(
  config: dict, rate_bps: float, transport: Transport, step_s: float
) -> float:
  """Returns the simulated seconds of a step in the middle of a run.

  Args:
    config: Config of the run, as its directory has it.
    rate_bps: Rate of both links (bits per second).
    transport: Transport of the prediction.
    step_s: Seconds of an inner step alone.
  """
  traffic = to_plan.traffic(from_mapping(config))
  cluster = cluster_of([rate_bps] * 2)
  return pace(traffic, cluster, step_s, transport=transport).step_s
