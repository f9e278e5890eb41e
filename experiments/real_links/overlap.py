"""Proves that exchanges overlap: one run whose link opens and closes in turn.

Rounds over a slow link are compared with the rounds over an open one just
before and after them, so that a machine that others use too disturbs both
alike. If the exchange hides behind the inner steps, both take the same time. If
it does not, rounds over the slow link are longer by the exchange. The control
keeps the exchange in the window's program, where CPUs overlap nothing.

The link becomes as slow as it must be for an exchange to take a given share of
a round, which the run's own rounds over the open link have shown.
"""

import collections
import dataclasses
import json
import pathlib
import statistics
from collections.abc import Callable, Sequence

from dilocox_jax.config import from_mapping, to_plan
from dilocox_jax.metrics.rows import Timing
from dilocox_jax.metrics.run_record import CONFIG
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.simulate.transfer import Transport
from experiments.real_links import timed_runs
from experiments.real_links.cases import predicted_s
from experiments.real_links.changing_link import OPEN_BIT_PER_S
from experiments.real_links.network import equal_cluster
from experiments.runtime.command_line import CONFIGS

_BLOCK = 4  # Rounds before the link changes.
_SKIPPED = 1  # First rounds of a block, in which it changes.
_COMPILING = 4  # First rounds of a run, which do not count.
_FIRST = 8  # Round from which the link changes; it is open before.
_NUM_ROUNDS = _FIRST + 8 * _BLOCK
_INTERVAL = 20  # H, and the steps that hide an exchange.
_SHARE = 0.6  # Of a round over the open link, which a slow exchange takes.
_COMMON = (
  f"--config.sync.sync_interval={_INTERVAL}",
  "--config.inner.warmup_steps=5",
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
    flags: Flags of the training.
  """

  name: str
  flags: tuple[str, ...]


CASES = (
  OverlapCase(
    "delayed, fp32",
    (
      f"--config={CONFIGS}/delayed.py",
      f"--config.sync.overlap_steps={_INTERVAL}",
      "--config.sync.rule=continue",
    ),
  ),
  OverlapCase(
    "dilocox, two messages",
    (f"--config={CONFIGS}/dilocox.py", "--config.codec.rank=16"),
  ),
)


@dataclasses.dataclass(frozen=True)
class OverlapRow:
  """What an alternating link did to the rounds of a run.

  Attributes:
    name: Name of the case.
    dispatch: What dispatched the exchange, "thread" or "round".
    rate_bps: Rate of the slow link (bits per second).
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
  rate_bps: float
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
  flags = (
    *(*case.flags, *_COMMON, f"--config.total_steps={_INTERVAL * _NUM_ROUNDS}"),
    *(f"--config.mesh.exchange_dispatch={dispatch}", f"--workdir={workdir}"),
  )
  link = AlternatingRate(lambda: _bits(workdir, transport))
  run = timed_runs.train_while_link_changes(flags, workdir, link)
  return compared(case, dispatch, run, link)


def _bits(workdir: pathlib.Path, transport: Transport) -> float:
  """Returns the simulated seconds of an exchange of a run at 1 bit/s."""
  config = from_mapping(json.loads((workdir / CONFIG).read_text()))
  pair = equal_cluster("1 Mbit/s", 2)
  collectives = to_plan.traffic(config).exchange(0)
  return 1e6 * predicted_s(pair, transport, *collectives)


class AlternatingRate:
  """The rate of a link that is open and slow in turn.

  Attributes:
    slow_bps: Rate of the slow link (bits per second); 0 until it is known.
    exchange_s: Simulated seconds of an exchange over the slow link.
  """

  def __init__(self, bits: Callable[[], float]):
    """Starts with an open link.

    Args:
      bits: Returns the simulated seconds of an exchange at 1 bit/s. Links have
        no delay, so that twice the rate takes half of them. It is called when
        the run has rounds.
    """
    self._bits = bits
    self.slow_bps, self.exchange_s = 0.0, 0.0

  def __call__(self, walls_s: Sequence[float]) -> float:
    """Returns the rate after rounds that took so many seconds each."""
    if not is_slow(len(walls_s)):
      return OPEN_BIT_PER_S
    if not self.slow_bps:
      self.exchange_s = _SHARE * statistics.median(walls_s[_COMPILING:])
      self.slow_bps = self._bits() / self.exchange_s
    return self.slow_bps


def compared(
  case: OverlapCase, dispatch: str, run: LoadedRun, link: AlternatingRate
) -> OverlapRow:
  """Compares the rounds of a run over the open and over the slow link.

  Args:
    case: The method and its slow link.
    dispatch: What dispatched the exchange.
    run: The run.
    link: The rates that its link had.
  """
  timings = [row for row in run.timings if row.event == "round"]
  by_state: dict[bool, list[Timing]] = {True: [], False: []}
  ratios, blocks = [], collections.defaultdict(list)
  pairs = zip(timings, run.rounds, strict=True)
  for number, (timing, row) in enumerate(pairs):
    if number >= _FIRST and number % _BLOCK >= _SKIPPED:
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
    link.slow_bps,
    (len(by_state[False]), len(by_state[True])),
    open_s,
    slow_s,
    _ratio_of_neighbours(blocks),
    link.exchange_s,
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
  return number >= _FIRST and number // _BLOCK % 2 == 0
