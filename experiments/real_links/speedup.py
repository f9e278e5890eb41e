"""Measures how many times faster than AllReduce a hidden exchange trains.

An all-reduce of the gradients takes 32 or 357 times as long as an inner step:
the first is the ratio of a small model, the second the speed-up that DiLoCoX
reports for 107B parameters (arXiv 2506.21263, published). Here the link is
slowed down until a small model has the same ratios. A method that hides its
exchange should then be nearly as many times faster.
"""

import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from dilocox_jax.config import RunConfig, from_mapping, to_plan
from dilocox_jax.report.run import LoadedRun, load_run
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.outcome import Work
from dilocox_jax.simulate.script import Script
from dilocox_jax.simulate.steady_state import steady_state
from dilocox_jax.simulate.transfer import Transport
from experiments.real_links.cases import predicted_s
from experiments.real_links.network import (
  equal_cluster,
  network_of,
  train_together,
)

RATIOS = (32, 357)
METHOD, BASELINE = "overlap_loco", "allreduce"

_CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_OPEN_RATE = "1 Gbit/s"  # A slice of the method takes 0.1 ms.
_NUM_REPLICAS = 2
_COMPILING = 4  # First segments of a run, which are not counted.
_COUNTED = {METHOD: 16, BASELINE: 4}  # Segments after these.
_COMMON = (
  *("--config.data.batch_size=8", "--config.data.sequence_length=64"),
  *("--config.inner.warmup_steps=5", "--config.mesh.layout=mesh"),
  *("--config.evaluation.interval_steps=0", "--config.adaptive.mode=off"),
  *("--config.evaluation.num_sequences=8", "--config.inner.optimizer=adamw"),
  "--config.checkpoint.interval_steps=1000000",
)
_SLICES = 16  # P of the method.
_UNHIDDEN = 0.01  # Share of a step that exchanges may cost by the simulator.
# AllReduce has no rounds: so many steps are dispatched and timed together.
_DISPATCHED = 1


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
  def predicted_speedup(self) -> float:
    """Speed-up over AllReduce by the simulator."""
    return self.predicted_baseline_s / self.predicted_method_s

  @property
  def utilisation(self) -> float:
    """Share of the method's time that its steps take over an open link."""
    return self.step_s / self.method_s


def run_all(transport: Transport, folder: pathlib.Path) -> list[SpeedupRow]:
  """Trains over an open link and over slow ones, and compares the seconds.

  Args:
    transport: Transport of the predictions.
    folder: Directory for the runs.
  """
  opened = _train(METHOD, _SLICES, _OPEN_RATE, folder / "open")
  step_s = seconds_per_step(opened)
  return [
    _compare(wanted, step_s, transport, folder / f"ratio_{wanted}")
    for wanted in RATIOS
  ]


def _compare(
  wanted: float, step_s: float, transport: Transport, folder: pathlib.Path
) -> SpeedupRow:
  rate_bps = rate_for(wanted * step_s, transport)
  rate = f"{rate_bps / 1e6:.4f} Mbit/s"
  cluster = equal_cluster(rate, _NUM_REPLICAS)

  def predicted(config: RunConfig) -> float:
    return predicted_step_s(config, cluster, transport, step_s)

  interval = hiding_interval(lambda h: predicted(_planned(h)) / step_s)
  baseline = _train(BASELINE, _DISPATCHED, rate, folder / BASELINE)
  method = _train(METHOD, interval, rate, folder / METHOD)
  return SpeedupRow(
    wanted,
    rate_bps,
    interval,
    step_s,
    seconds_per_step(baseline),
    predicted(from_mapping(baseline.config)),
    seconds_per_step(method),
    predicted(from_mapping(method.config)),
    bytes_ratio(method),
  )


def hiding_interval(slowdown: Callable[[int], float]) -> int:
  """Returns the smallest H, a multiple of P, whose exchanges cost no time.

  Args:
    slowdown: Seconds of a step, exchanges included, over those of a step alone,
      for an H.
  """
  intervals = itertools.count(_SLICES, _SLICES)
  return next(h for h in intervals if slowdown(h) < 1 + _UNHIDDEN)


def rate_for(exchange_s: float, transport: Transport) -> float:
  """Returns the rate at which AllReduce's exchange takes so long (bits/s).

  Args:
    exchange_s: Seconds that the exchange should take.
    transport: Transport of the prediction. Links have no delay, so that twice
      the rate takes half of the seconds.
  """
  config = from_mapping({"sync": {"method": BASELINE}})
  collectives = to_plan.traffic(config).gradient()
  pair = equal_cluster("1 Mbit/s", _NUM_REPLICAS)
  return 1e6 * predicted_s(pair, transport, *collectives) / exchange_s


def predicted_step_s(
  config: RunConfig, cluster: Cluster, transport: Transport, step_s: float
) -> float:
  """Returns the simulated seconds of a step in the middle of a run.

  Args:
    config: Config of the run.
    cluster: The nodes and their links.
    transport: Transport of the prediction.
    step_s: Seconds of an inner step alone.
  """
  steps_s = np.full(cluster.num_replicas, step_s)
  found = steady_state(
    LinkCosts(cluster, transport),
    Work(steps_s, np.zeros(cluster.num_replicas)),
    Script(to_plan.traffic(config)),
    to_plan.run_plan(config),
  )
  return found.step_s


def seconds_per_step(run: LoadedRun) -> float:
  """Returns the median over segments of the seconds of an inner step.

  Args:
    run: A run, whose first segments, which compile, are not counted.
  """
  return statistics.median(
    timing.wall_s / num_steps for timing, num_steps in _counted(run)
  )


def bytes_ratio(run: LoadedRun) -> float:
  """Returns the bytes on the link over those of the plan, over all segments.

  Args:
    run: A run whose first segments, which compile, are not counted.
  """
  timed = [row for row in run.timings if row.event == "round"][_COMPILING:]
  planned = sum(row.sent_bytes for row in run.rounds[_COMPILING:])
  return sum(row.link_bytes for row in timed) / planned


def _counted(run: LoadedRun) -> Sequence[tuple]:
  timings = [row for row in run.timings if row.event == "round"]
  ends = [0, *(row.step for row in run.rounds)]
  pairs = [
    (timing, end - begin)
    for timing, (begin, end) in zip(
      timings, itertools.pairwise(ends), strict=True
    )
  ]
  return pairs[_COMPILING:]


def _planned(sync_interval: int) -> RunConfig:
  sync = {"method": METHOD, "sync_interval": sync_interval}
  return from_mapping({"sync": sync})


def _train(
  method: str, steps_per_segment: int, rate: str, workdir: pathlib.Path
) -> LoadedRun:
  num_steps = steps_per_segment * (_COMPILING + _COUNTED[method])
  flags = (
    *(f"--config={_CONFIGS}/{method}.py", *_COMMON),
    *(f"--config.total_steps={num_steps}", f"--workdir={workdir}"),
  )
  if method == BASELINE:
    flags += (f"--config.sync.steps_per_dispatch={_DISPATCHED}",)
  else:
    flags += (f"--config.sync.sync_interval={steps_per_segment}",)
  with network_of(equal_cluster(rate, _NUM_REPLICAS)) as network:
    train_together(network, flags)
  return load_run(workdir)
