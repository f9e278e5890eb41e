"""Compares the simulator's ranking of methods with measured seconds of a step.

Whoever chooses a method by `experiments.simulate` relies on the order in which
the simulator puts them, more than on its seconds. Here eight settings train
over one slow link, and every pair of them is compared.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence

from dilocox_jax.config import from_mapping
from dilocox_jax.simulate.transfer import Transport
from experiments.real_links import timed_runs
from experiments.real_links.network import equal_cluster

_RATIO = 32  # Seconds of an all-reduce over those of an inner step.
_CONTINUE = "sync.rule=continue"
# Name of a config file, H and changed fields. The expected seconds of a step
# over those of an inner step alone lie between 1 and 33.
SETTINGS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
  ("allreduce", 1, ()),
  ("diloco", 4, ()),
  ("open_diloco", 4, ()),
  ("diloco", 16, ()),
  ("delayed", 16, ("sync.overlap_steps=16", _CONTINUE)),
  ("muloco", 8, ()),
  ("muloco", 32, ()),
  ("overlap_loco", 16, ()),
)


@dataclasses.dataclass(frozen=True)
class RankedRow:
  """A setting on the slow link.

  Attributes:
    name: Name of the method's config file.
    sync_interval: H (inner steps).
    predicted_s: Simulated seconds of a step, exchanges included.
    measured_s: Measured seconds of a step.
  """

  name: str
  sync_interval: int
  predicted_s: float
  measured_s: float


def run_all(transport: Transport, folder: pathlib.Path) -> list[RankedRow]:
  """Trains over an open link, and then every setting over one slow link.

  Args:
    transport: Transport of the predictions.
    folder: Directory for the runs.
  """
  step_s = timed_runs.open_step_s(folder)
  rate = f"{timed_runs.rate_for(_RATIO * step_s, transport) / 1e6:.4f} Mbit/s"
  cluster = equal_cluster(rate, timed_runs.NUM_REPLICAS)
  rows = []
  for name, interval, changes in SETTINGS:
    workdir = folder / f"ranking_{name}_{interval}"
    run = timed_runs.train(
      name,
      interval,
      rate,
      workdir,
      num_segments=timed_runs.COMPILING + 8,
      changes=changes,
    )
    predicted_s = timed_runs.predicted_step_s(
      from_mapping(run.config), cluster, transport, step_s
    )
    measured_s = timed_runs.seconds_per_step(run)
    rows.append(RankedRow(name, interval, predicted_s, measured_s))
  return rows


def agreeing_pairs(rows: Sequence[RankedRow]) -> tuple[int, int]:
  """Returns how many pairs are in the predicted order, and how many there are.

  Args:
    rows: Settings on one link.
  """
  pairs = list(itertools.combinations(rows, 2))
  agreeing = sum(
    (a.predicted_s < b.predicted_s) == (a.measured_s < b.measured_s)
    for a, b in pairs
  )
  return agreeing, len(pairs)
