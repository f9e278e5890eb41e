"""Measures methods over a link that becomes slower while they train.

DiLoCoX (arXiv 2506.21263) reports tokens a second of several methods over
1 Gbit/s. Here the same methods train a small model for which AllReduce is bound
by the link, over an open link first and then over slower ones, in one run of
each method. So a machine that becomes slower from one run to the next does not
change what links cost.

The simulator is told the seconds of a step that the run took over the open
link, less what its exchanges cost there, and predicts those over the others.
Over an open link the machine and not the link is what is slow, so the cost of
collectives there is measured (`cases.calibrated_open`).
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.simulate.transfer import Transport
from experiments.tools.real_links import timed_runs
from experiments.tools.real_links.changing_link import OPEN_BIT_PER_S
from experiments.tools.real_links.network import equal_cluster

RATES_BPS = (1e9, 200e6, 50e6)
_COMPILING = 3  # First segments of a run, which are not counted.
_SEGMENTS = 4  # Over each link. The first is not counted: the link changes.
# Name of a config file, inner steps of a segment, and changed fields. A segment
# is a round, or some steps of a method that has no rounds.
SETTINGS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
  ("allreduce", 4, ()),
  ("diloco", 1, ()),
  ("diloco", 5, ()),
  ("diloco", 20, ()),
  ("diloco", 60, ()),
  ("open_diloco", 20, ()),
  ("streaming_diloco", 20, ("sync.num_fragments=4", "sync.overlap_steps=10")),
  ("cocktail_sgd", 10, ()),
  ("dilocox", 20, ("exchange.codec=low_rank(rank=32)+int(bits=4)",)),
  ("overlap_loco", 20, ("sync.num_fragments=4",)),
)


@dataclasses.dataclass(frozen=True)
class BandwidthRow:
  """A method over one link.

  Attributes:
    name: Name of the method's config file.
    sync_interval: H (inner steps); 1 for methods without rounds.
    rate_bps: Rate of the link (bits per second).
    tokens_per_step: Tokens of both replicas in an inner step.
    alone_s: Seconds of a step without its exchanges: those over the open link
      less what the exchanges cost there.
    predicted_s: Simulated seconds of a step, exchanges included.
    measured_s: Measured seconds of a step, exchanges included.
    bytes_ratio: Bytes on the link over those of the plan.
  """

  name: str
  sync_interval: int
  rate_bps: float
  tokens_per_step: int
  alone_s: float
  predicted_s: float
  measured_s: float
  bytes_ratio: float

  @property
  def utilisation(self) -> float:
    """Share of the time that the steps alone take, measured."""
    return self.alone_s / self.measured_s


def run_all(
  transport: Transport, open_transport: Transport, folder: pathlib.Path
) -> list[BandwidthRow]:
  """Trains every setting over all links.

  Args:
    transport: Transport of the predictions.
    open_transport: Transport over the open link.
    folder: Directory for the runs.
  """
  rows = []
  for name, interval, changes in SETTINGS:
    run = _train(name, interval, changes, folder / f"{name}_{interval}")
    rows += measured(run, name, transport, open_transport)
  return rows


def rate_of(walls_s: Sequence[float]) -> float:
  """Returns the link's rate after segments that took so many seconds each."""
  number = (len(walls_s) - _COMPILING) // _SEGMENTS
  return (OPEN_BIT_PER_S, *RATES_BPS)[max(0, min(number, len(RATES_BPS)))]


def _train(
  name: str, interval: int, changes: Sequence[str], workdir: pathlib.Path
) -> LoadedRun:
  num_segments = _COMPILING + _SEGMENTS * (1 + len(RATES_BPS))
  flags = timed_runs.flags_of(
    name,
    interval,
    num_segments,
    workdir,
    (*timed_runs.LARGER_CHANGES, *changes),
  )
  return timed_runs.train_while_link_changes(flags, workdir, rate_of)


def measured(
  run: LoadedRun, name: str, transport: Transport, open_transport: Transport
) -> list[BandwidthRow]:
  """Returns what a run took over each link, beside the simulator's seconds.

  Args:
    run: A run whose link changed as `rate_of` says.
    name: Name of the method's config file.
    transport: Transport of the predictions.
    open_transport: Transport over the open link.
  """
  config = from_mapping(run.config)
  segments = timed_runs.segments(run)[_COMPILING:]
  blocks = [
    segments[start + 1 : start + _SEGMENTS]
    for start in range(0, len(segments), _SEGMENTS)
  ]
  seconds = [timed_runs.median_step_s(block) for block in blocks]
  with_exchanges_s = _predicted(
    config, OPEN_BIT_PER_S, open_transport, seconds[0]
  )
  alone_s = seconds[0] - (with_exchanges_s - seconds[0])
  named = config.sync.named
  interval = (
    1 if named.exchanged == "gradient" else named.schedule.sync_interval
  )
  data = config.data
  tokens = timed_runs.NUM_REPLICAS * data.batch_size * data.sequence_length
  return [
    BandwidthRow(
      name,
      interval,
      rate_bps,
      tokens,
      alone_s,
      _predicted(config, rate_bps, transport, alone_s),
      step_s,
      timed_runs.ratio_of_bytes(block),
    )
    for rate_bps, step_s, block in zip(
      RATES_BPS, seconds[1:], blocks[1:], strict=True
    )
  ]


def _predicted(
  config: RunConfig, rate_bps: float, transport: Transport, step_s: float
) -> float:
  cluster = equal_cluster(f"{rate_bps / 1e6} Mbit/s", timed_runs.NUM_REPLICAS)
  return timed_runs.predicted_step_s(config, cluster, transport, step_s)
