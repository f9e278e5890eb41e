"""Proves that exchanges overlap: one run whose link opens and closes in turn.

Rounds over a slow link are compared with the rounds over an open one just
before and after them, so that a machine that others use too disturbs both
alike. If the exchange hides behind the inner steps, both take the same time. If
it does not, rounds over the slow link are longer by the exchange. The control
keeps the exchange in the round's program, where CPUs overlap nothing.
"""

import collections
import dataclasses
import pathlib
import statistics
import threading

from dilocox_jax.config import from_mapping, to_plan
from dilocox_jax.metrics.lines import RecordError, read_rows
from dilocox_jax.metrics.recorder import TIMING
from dilocox_jax.metrics.rows import Timing
from dilocox_jax.report.run import LoadedRun, load_run
from dilocox_jax.simulate.transfer import Transport
from experiments.real_links.cases import predicted_s
from experiments.real_links.network import (
  equal_cluster,
  network_of,
  train_together,
)
from experiments.runtime.throttled_network import NodeLink, ThrottledNetwork

_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_OPEN = NodeLink(1e10, 1e10)
_NUM_ROUNDS = 48
_BLOCK = 4  # Rounds before the link changes.
_SKIPPED = 1  # First rounds of a block, in which it changes.
_COMPILING = 8  # First rounds of a run, which are not compared.
_POLL_S = 0.02
_COMMON = (
  *("--config.sync.sync_interval=20", "--config.inner.warmup_steps=5"),
  *("--config.data.batch_size=4", "--config.data.sequence_length=64"),
  *("--config.evaluation.interval_steps=0", "--config.adaptive.mode=off"),
  *("--config.evaluation.num_sequences=8", "--config.mesh.layout=mesh"),
  "--config.checkpoint.interval_steps=1000000",
)


@dataclasses.dataclass(frozen=True)
class OverlapCase:
  """A method whose exchange should hide behind its inner steps.

  Attributes:
    name: Name for the table.
    rate: Rate of the slow link, as cluster files write it.
    flags: Flags of the training.
  """

  name: str
  rate: str
  flags: tuple[str, ...]


CASES = (
  OverlapCase(
    "delayed, fp32",
    "50 Mbit/s",
    (
      f"--config={_CONFIGS}/delayed.py",
      "--config.sync.overlap_steps=20",
      "--config.sync.rule=continue",
    ),
  ),
  OverlapCase(
    "dilocox, two messages",
    "10 Mbit/s",
    (f"--config={_CONFIGS}/dilocox.py", "--config.codec.rank=16"),
  ),
)


@dataclasses.dataclass(frozen=True)
class OverlapRow:
  """What an alternating link did to the rounds of a run.

  Attributes:
    name: Name of the case.
    dispatch: What dispatched the exchange, "thread" or "round".
    rate: Rate of the slow link.
    num_rounds: Rounds compared over the open and over the slow link.
    open_s: Median seconds of a round over the open link.
    slow_s: Median seconds of a round over the slow link.
    ratio: Seconds of a round over the slow link over those over the open link:
      median over all changes of the link of the medians just around them.
    predicted_exchange_s: Simulated seconds of the exchange on the slow link.
    exposed_s: Median seconds that steps waited on the slow link; NaN where the
      round's program does not tell.
    bytes_ratio: Bytes on the link over those of the plan, median of rounds.
  """

  name: str
  dispatch: str
  rate: str
  num_rounds: tuple[int, int]
  open_s: float
  slow_s: float
  ratio: float
  predicted_exchange_s: float
  exposed_s: float
  bytes_ratio: float

  @property
  def predicted_exposed_s(self) -> float:
    """Seconds that the exchange should outlast the inner steps."""
    return max(0.0, self.predicted_exchange_s - self.open_s)


def run_all(transport: Transport, folder: pathlib.Path) -> list[OverlapRow]:
  """Runs every case, and its control.

  Args:
    transport: Transport of the predictions.
    folder: Directory for the runs.
  """
  return [
    _run(case, dispatch, transport, folder)
    for case in CASES
    for dispatch in ("thread", "round")
  ]


def _run(
  case: OverlapCase, dispatch: str, transport: Transport, folder: pathlib.Path
) -> OverlapRow:
  """Trains on a link that opens and closes, and compares the rounds.

  Args:
    case: The method and its slow link.
    dispatch: "thread", or "round" for the control.
    transport: Transport of the prediction.
    folder: Directory for the run.
  """
  workdir = folder / f"{case.name.replace(', ', '_')}_{dispatch}"
  cluster = equal_cluster(case.rate, 2)
  slow = cluster.sites[0].link
  flags = (
    *(*case.flags, *_COMMON, f"--config.total_steps={20 * _NUM_ROUNDS}"),
    *(f"--config.mesh.exchange_dispatch={dispatch}", f"--workdir={workdir}"),
  )
  with network_of(cluster) as network:
    link = NodeLink(slow.up_bps, slow.down_bps)
    with _alternating(network, workdir / TIMING, link):
      train_together(network, flags)
  run = load_run(workdir)
  traffic = to_plan.traffic(from_mapping(run.config))
  exchange_s = predicted_s(cluster, transport, *traffic.exchange(0))
  return compared(case, dispatch, run, exchange_s)


def compared(
  case: OverlapCase, dispatch: str, run: LoadedRun, exchange_s: float
) -> OverlapRow:
  """Compares the rounds of a run over the open and over the slow link.

  Args:
    case: The method and its slow link.
    dispatch: What dispatched the exchange.
    run: The run.
    exchange_s: Simulated seconds of the exchange on the slow link.
  """
  timings = [row for row in run.timings if row.event == "round"]
  by_state: dict[bool, list[Timing]] = {True: [], False: []}
  ratios, blocks = [], collections.defaultdict(list)
  pairs = zip(timings, run.rounds, strict=True)
  for number, (timing, row) in enumerate(pairs):
    if number >= _COMPILING and number % _BLOCK >= _SKIPPED:
      by_state[is_slow(number)].append(timing)
      blocks[number // _BLOCK].append(timing.wall_s)
      ratios.append(timing.link_bytes / row.sent_bytes)
  open_s, slow_s = (
    statistics.median(row.wall_s for row in by_state[state])
    for state in (False, True)
  )
  exposed_s = statistics.median(row.exposed_s for row in by_state[True])
  return OverlapRow(
    case.name,
    dispatch,
    case.rate,
    (len(by_state[False]), len(by_state[True])),
    open_s,
    slow_s,
    _ratio_of_neighbours(blocks),
    exchange_s,
    exposed_s,
    statistics.median(ratios),
  )


def _ratio_of_neighbours(blocks: dict[int, list[float]]) -> float:
  """Returns slow over open, from seconds of rounds by number of their block."""
  medians = {n: statistics.median(walls) for n, walls in blocks.items()}
  ratios = []
  for block in medians:
    if block + 1 in medians:
      slow, other = sorted(
        (block, block + 1), key=lambda n: not is_slow(n * _BLOCK)
      )
      ratios.append(medians[slow] / medians[other])
  return statistics.median(ratios)


def is_slow(number: int) -> bool:
  """Whether a round of a run has the slow link, by its number from 0."""
  return number // _BLOCK % 2 == 1


class _alternating:
  """Opens and closes the links of a network as rounds of a run end."""

  def __init__(
    self, network: ThrottledNetwork, timing: pathlib.Path, slow: NodeLink
  ):
    self._network, self._timing, self._slow = network, timing, slow
    self._end = threading.Event()
    self._thread = threading.Thread(target=self._run)

  def __enter__(self) -> None:
    self._throttle(is_slow(0))
    self._thread.start()

  def __exit__(self, *exception: object) -> None:
    self._end.set()
    self._thread.join()

  def _run(self) -> None:
    was_slow = is_slow(0)
    while not self._end.wait(_POLL_S):
      now = is_slow(self._num_rounds())
      if now != was_slow:
        self._throttle(now)
      was_slow = now

  def _num_rounds(self) -> int:
    try:
      rows = read_rows(self._timing)
    except RecordError:
      return 0
    return sum(row["event"] == "round" for row in rows)

  def _throttle(self, to_slow: bool) -> None:
    for node in range(len(self._network.addresses)):
      self._network.throttle(node, self._slow if to_slow else _OPEN)
