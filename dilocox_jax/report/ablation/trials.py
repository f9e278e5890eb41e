"""Runs of an ablation gathered into settings: the numbers behind its report.

A setting's loss is a mean over its seeds, and a loss without its spread invites
reading noise, so both are kept together. Seeds on different corpora are never
averaged.
"""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.report.run import LoadedRun, load_run


@dataclasses.dataclass(frozen=True)
class TrialOutcome:
  """What became of one run.

  Attributes:
    name: Of its setting; seeds share it.
    seed: Its seed.
    workdir: Its run directory.
    changed: What the setting gives, by short names.
    settings: Value of every field that varies in the ablation.
    times_fewer_bytes: Bytes of a sync in fp32 over those of its codec.
    failure: Why it failed, in one line; empty if it did not.
    log: What its process wrote.
  """

  name: str
  seed: int
  workdir: pathlib.Path
  changed: Mapping[str, Any]
  settings: Mapping[str, Any]
  times_fewer_bytes: float
  failure: str
  log: pathlib.Path


@dataclasses.dataclass(frozen=True)
class SettingResult:
  """A setting on a corpus, with the results of its seeds.

  Attributes:
    name: Of the setting.
    corpus: Name and digest of the text.
    changed: What the setting gives, by short names.
    settings: Value of every field that varies in the ablation.
    seeds: Those that ended.
    losses: Validation losses, in nats a token, one a seed.
    num_seeds: How many there should be.
    total_sent_bytes: What one replica sent, mean over seeds.
    times_fewer_bytes: Bytes of a sync in fp32 over those of its codec.
    workdirs: Run directories, one a seed.
  """

  name: str
  corpus: str
  changed: Mapping[str, Any]
  settings: Mapping[str, Any]
  seeds: tuple[int, ...]
  losses: tuple[float, ...]
  num_seeds: int
  total_sent_bytes: int
  times_fewer_bytes: float
  workdirs: tuple[pathlib.Path, ...]

  @property
  def validation_loss(self) -> float:
    """Mean over the seeds."""
    return statistics.fmean(self.losses)

  @property
  def standard_error(self) -> float:
    """Of the mean; NaN with one seed."""
    count = len(self.losses)
    if count < 2:
      return math.nan
    return statistics.stdev(self.losses) / math.sqrt(count)

  @property
  def is_incomplete(self) -> bool:
    """Whether seeds are missing."""
    return len(self.losses) < self.num_seeds


def _entry(
  found: Sequence[tuple[TrialOutcome, LoadedRun]], num_seeds: int
) -> SettingResult:
  outcome, first = found[0]
  sent_bytes = [run.total_sent_bytes for _, run in found]
  return SettingResult(
    name=outcome.name,
    corpus=first.corpus,
    changed=outcome.changed,
    settings=outcome.settings,
    seeds=tuple(each.seed for each, _ in found),
    losses=tuple(run.validation_loss for _, run in found),
    num_seeds=num_seeds,
    total_sent_bytes=round(statistics.fmean(sent_bytes)),
    times_fewer_bytes=outcome.times_fewer_bytes,
    workdirs=tuple(run.workdir for _, run in found),
  )


def entries(outcomes: Sequence[TrialOutcome]) -> list[SettingResult]:
  """Gathers what ended by setting and corpus, lowest loss first.

  Args:
    outcomes: What became of each run; failed ones are left out.

  Raises:
    ValueError: A run that did not fail has no readable directory.
  """
  found: dict[tuple[str, str], list[tuple[TrialOutcome, LoadedRun]]] = {}
  for outcome in outcomes:
    if not outcome.failure:
      run = load_run(outcome.workdir)
      found.setdefault((outcome.name, run.corpus), []).append((outcome, run))
  names = [outcome.name for outcome in outcomes]
  spread = [name for name, _ in found]  # A name may be on several corpora.
  made = [
    _entry(each, names.count(name) if spread.count(name) == 1 else len(each))
    for (name, _), each in found.items()
  ]
  return sorted(made, key=lambda entry: entry.validation_loss)


def pareto_front(found: Sequence[SettingResult]) -> list[SettingResult]:
  """Settings that none other beats in loss at as few bytes, fewest first."""
  front: list[SettingResult] = []
  by_bytes = sorted(
    (entry for entry in found if math.isfinite(entry.validation_loss)),
    key=lambda entry: (entry.total_sent_bytes, entry.validation_loss),
  )
  for entry in by_bytes:
    if not front or entry.validation_loss < front[-1].validation_loss:
      front.append(entry)
  return front
