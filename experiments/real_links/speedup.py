"""Measures how many times faster than AllReduce a hidden exchange trains.

DiLoCoX (arXiv 2506.21263) reports to be 32 times faster than AllReduce for 1.3B
parameters (recalled) and 357 times for 107B (published). So here the link is
slowed down until an all-reduce of a small model's gradients takes 32 and 357
times as long as an inner step, which the same run has taken over an open link
before. A method that hides its exchange should then be nearly as many times
faster.
"""

import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Callable, Sequence

from dilocox_jax.config import RunConfig, from_mapping
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.simulate.transfer import Transport
from experiments.real_links import timed_runs
from experiments.real_links.changing_link import OPEN_BIT_PER_S
from experiments.real_links.network import equal_cluster

RATIOS = (32, 357)
_OPEN, _SLOW = 8, 8  # Segments over the open and over the slow link.
# Each of AllReduce's steps takes seconds, and programs are compiled in two.
_BASELINE_COMPILING, _SLOW_BASELINE = 2, 2
_UNHIDDEN = 0.01  # Share of a step that exchanges may cost by the simulator.


@dataclasses.dataclass(frozen=True)
class SpeedupRow:
  """Two methods on a link that makes AllReduce so many times slower.

  Attributes:
    wanted: Seconds of an all-reduce over those of an inner step.
    rate_bps: Rate of the link (bits per second).
    sync_interval: H of the method (inner steps).
    step_s: Seconds of an inner step of the method over an open link.
    baseline_s: Measured seconds of a step of AllReduce, exchange included.
    predicted_baseline_s: The same by the simulator.
    method_s: Measured seconds of a step of the method, exchanges included.
    predicted_method_s: The same by the simulator.
    bytes_ratio: Bytes on the link of the method over those of its plan.
  """

  wanted: float
  rate_bps: float
  sync_interval: int
  step_s: float
  baseline_s: float
  predicted_baseline_s: float
  method_s: float
  predicted_method_s: float
  bytes_ratio: float

  @property
  def speedup(self) -> float:
    """Measured speed-up over AllReduce."""
    return self.baseline_s / self.method_s

  @property
  def utilisation(self) -> float:
    """Share of the method's time that its steps take over an open link."""
    return self.step_s / self.method_s


def run_all(transport: Transport, folder: pathlib.Path) -> list[SpeedupRow]:
  """Trains over an open link and then over slow ones, and compares seconds.

  Args:
    transport: Transport of the predictions.
    folder: Directory for the runs.
  """
  return [
    _compare(wanted, transport, folder / f"ratio_{wanted}") for wanted in RATIOS
  ]


class SlowsDown:
  """The rate of a link that is open first, and then as slow as is wanted.

  Attributes:
    rate_bps: The later rate (bits per second); 0 until it is known.
  """

  def __init__(self, num_open: int, rate_of: Callable[[float], float]):
    """Starts with an open link.

    Args:
      num_open: Segments over the open link.
      rate_of: Returns the later rate from the median of their seconds; those
        that compile do not count.
    """
    self._num_open, self._rate_of = num_open, rate_of
    self.rate_bps = 0.0

  def __call__(self, walls_s: Sequence[float]) -> float:
    """Returns the rate after segments that took so many seconds each."""
    if len(walls_s) < self._num_open:
      return OPEN_BIT_PER_S
    if not self.rate_bps:
      open_s = statistics.median(walls_s[timed_runs.COMPILING : self._num_open])
      self.rate_bps = self._rate_of(open_s)
    return self.rate_bps


def _compare(
  wanted: float, transport: Transport, folder: pathlib.Path
) -> SpeedupRow:
  interval = shortest_round(wanted, transport)
  num_open = timed_runs.COMPILING + _OPEN
  link = SlowsDown(
    num_open,
    lambda round_s: timed_runs.rate_for(
      wanted * round_s / interval, transport, timed_runs.LARGER
    ),
  )
  workdir = folder / timed_runs.METHOD
  method = timed_runs.train_while_link_changes(
    timed_runs.flags_of(
      timed_runs.METHOD,
      interval,
      num_open + 1 + _SLOW,
      workdir,
      timed_runs.LARGER_CHANGES,
    ),
    workdir,
    link,
  )
  # Steps of AllReduce over an open link would end before the link changes.
  baseline = timed_runs.train(
    timed_runs.BASELINE,
    1,
    f"{link.rate_bps / 1e6:.6f} Mbit/s",
    folder / timed_runs.BASELINE,
    num_segments=_BASELINE_COMPILING + _SLOW_BASELINE,
    changes=timed_runs.LARGER_CHANGES,
  )
  cluster = equal_cluster(
    f"{link.rate_bps / 1e6:.6f} Mbit/s", timed_runs.NUM_REPLICAS
  )
  open_part = timed_runs.segments(method)[timed_runs.COMPILING : num_open]
  slow_part = timed_runs.segments(method)[num_open + 1 :]
  slow_baseline = timed_runs.segments(baseline)[_BASELINE_COMPILING:]
  step_s = timed_runs.median_step_s(open_part)

  def predicted(run: LoadedRun) -> float:
    return timed_runs.predicted_step_s(
      from_mapping(run.config), cluster, transport, step_s
    )

  return SpeedupRow(
    wanted,
    link.rate_bps,
    interval,
    step_s,
    timed_runs.median_step_s(slow_baseline),
    predicted(baseline),
    timed_runs.median_step_s(slow_part),
    predicted(method),
    timed_runs.ratio_of_bytes(slow_part),
  )


def shortest_round(wanted: float, transport: Transport) -> int:
  """Returns the smallest H of the method whose exchanges cost no time.

  Without delays only the ratio of an all-reduce to a step matters, so a step
  takes a second here.

  Args:
    wanted: Seconds of an all-reduce over those of a step.
    transport: Transport of the predictions.
  """
  rate_bps = timed_runs.rate_for(wanted, transport, timed_runs.LARGER)
  cluster = equal_cluster(
    f"{rate_bps / 1e6:.6f} Mbit/s", timed_runs.NUM_REPLICAS
  )
  return hiding_interval(
    lambda interval: timed_runs.predicted_step_s(
      _planned(interval), cluster, transport, 1.0
    )
  )


def hiding_interval(slowdown: Callable[[int], float]) -> int:
  """Returns the smallest H, a multiple of P, whose exchanges cost no time.

  Args:
    slowdown: Seconds of a step, exchanges included, over those of a step alone,
      for an H.
  """
  intervals = itertools.count(timed_runs.SLICES, timed_runs.SLICES)
  return next(h for h in intervals if slowdown(h) < 1 + _UNHIDDEN)


def _planned(sync_interval: int) -> RunConfig:
  sync = {"method": timed_runs.METHOD, "sync_interval": sync_interval}
  return from_mapping({"sync": sync, **timed_runs.LARGER})
