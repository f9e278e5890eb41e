"""Methods that train over throttled links, beside the simulator's seconds.

DiLoCoX (arXiv 2506.21263) reports tokens a second of several methods over
1 Gbit/s. Here the same methods train a small model for which AllReduce is bound
by the link. The simulator is told the seconds of a step of the last row, which
sends every 60 steps over a link faster than this machine, and predicts the
others.
"""

import dataclasses
import itertools
import pathlib
import statistics
from collections.abc import Sequence

import numpy as np

from dilocox_jax.config import from_mapping, to_plan
from dilocox_jax.plan.schedule.methods import named_method
from dilocox_jax.report.run import LoadedRun, load_run
from dilocox_jax.simulate.interpreter import Work
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.script import Script
from dilocox_jax.simulate.steps import steady_state
from dilocox_jax.simulate.transfer import Transport
from experiments.runtime.throttled_network import NodeLink, ThrottledNetwork
from experiments.tools import link_cases

RATES_BPS = (200e6, 50e6)
_OPEN_BPS = 1e10  # Faster than two processes of one machine send.
_COUNT = 2  # Replicas.
_COMPILING = 3  # First segments of a run, which are not counted.
_SEGMENTS = 4
_ALONE = "diloco", 60, ()
# Name of a method, inner steps of a segment, and changed fields. A segment
# is a round, or some steps of a method that has no rounds.
SETTINGS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
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
  *("inner.warmup_steps=1", "mesh.layout=mesh", "adaptive.mode=off"),
  *("evaluation.interval_steps=0", "evaluation.num_sequences=8"),
  "checkpoint.interval_steps=1000000",
)


@dataclasses.dataclass(frozen=True)
class MethodRow:
  """A method over one link.

  Attributes:
    name: Name of the method.
    rate_bps: Rate of the link (bits per second).
    predicted_s: Simulated seconds of a step, exchanges included.
    measured_s: Measured seconds of a step, exchanges included.
    bytes_ratio: Bytes on the link over those of the plan.
  """

  name: str
  rate_bps: float
  predicted_s: float
  measured_s: float
  bytes_ratio: float


def run_all(transport: Transport, folder: pathlib.Path) -> list[MethodRow]:
  """Trains every setting over all links.

  Args:
    transport: Transport of the predictions.
    folder: Directory for the runs.
  """
  rows = []
  # The link's check needs a rate that this machine can carry.
  with link_cases.network_of(
    link_cases.equal_cluster("100 Mbit/s", _COUNT)
  ) as network:
    _throttle(network, _OPEN_BPS)
    alone = _train(network, *_ALONE, folder / "alone")
    alone_s, _ = measured(alone)
    for rate_bps, setting in itertools.product(RATES_BPS, SETTINGS):
      _throttle(network, rate_bps)
      path = folder / f"{setting[0]}_{rate_bps / 1e6:.0f}mbit"
      run = _train(network, *setting, path)
      predicted_s = predicted(run.config, rate_bps, transport, alone_s)
      row = setting[0], rate_bps, predicted_s, *measured(run)
      rows.append(MethodRow(*row))
  return rows


def _throttle(network: ThrottledNetwork, rate_bps: float) -> None:
  for node in range(_COUNT):
    network.throttle(node, NodeLink(rate_bps, rate_bps))


def flags_of(
  method: str, interval: int, changes: Sequence[str], workdir: pathlib.Path
) -> list[str]:
  """Returns the flags of `experiments.train` for a short run.

  Args:
    method: Name of the method.
    interval: H of the method, or the steps that are dispatched at once if it
      has no rounds. Both are a segment.
    changes: Further fields of the config, as "section.field=value".
    workdir: Directory of the run.
  """
  has_rounds = named_method(method).exchanged != "gradient"
  field = "sync_interval" if has_rounds else "steps_per_dispatch"
  steps = f"total_steps={interval * (_COMPILING + _SEGMENTS)}"
  fields = *_COMMON, steps, f"sync.{field}={interval}", *changes
  return [
    f"--config.sync.method={method}",
    f"--workdir={workdir}",
    *(f"--config.{field}" for field in fields),
  ]


def _train(
  network: ThrottledNetwork,
  method: str,
  interval: int,
  changes: Sequence[str],
  workdir: pathlib.Path,
) -> LoadedRun:
  place = "--coordinator={coordinator}", "--num_processes={count}"
  given = flags_of(method, interval, changes, workdir)
  link_cases.run_together(
    network,
    "experiments.train",
    [*given, "--distributed", *place, "--process_id={node}"],
  )
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
    rate_bps: Rate of every link (bits per second).
    transport: Transport of the prediction.
    step_s: Seconds of an inner step alone.
  """
  checked = from_mapping(config)
  cluster = link_cases.equal_cluster(f"{rate_bps / 1e6} Mbit/s", _COUNT)
  found = steady_state(
    LinkCosts(cluster, transport),
    Work(np.full(_COUNT, step_s), np.zeros(_COUNT)),
    Script(to_plan.traffic(checked)),
    to_plan.run_plan(checked),
  )
  return found.step_s
