"""Runs of an ablation, collected by setting.

A setting is one choice of hyper-parameters; a trial is one run of it with one
seed. Trials on different corpora are never averaged.
"""

import collections
import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from dilocox_jax.report.run import LoadedRun, load_run
from dilocox_jax.report.spread import Spread


@dataclasses.dataclass(frozen=True)
class TrialOutcome:
  """Outcome of one trial.

  Attributes:
    name: Name of the setting; its seeds share it.
    seed: Integer seed of the trial.
    workdir: Run directory of the trial.
    changed: Values that define the setting, by short name of their field.
    settings: Value of every field that varies in the ablation.
    times_fewer_bytes: Bytes of a sync in fp32 / bytes with the codec.
    failure: Why the trial failed, in one line; empty if it ended.
    log: File with the output of its process.
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
  """Results of a setting on one corpus.

  Attributes:
    name: Name of the setting.
    corpus: Name and digests of the text.
    changed: Values that define the setting, by short name of their field.
    settings: Value of every field that varies in the ablation.
    seeds: Seeds that ended.
    spread: Validation losses (nats a token), one per seed.
    num_seeds: Number of seeds that there should be.
    sent_bytes: Bytes that one replica sent, mean over seeds.
    times_fewer_bytes: Bytes of a sync in fp32 / bytes with the codec.
    workdirs: Run directories, one per seed.
  """

  name: str
  corpus: str
  changed: Mapping[str, Any]
  settings: Mapping[str, Any]
  seeds: tuple[int, ...]
  spread: Spread
  num_seeds: int
  sent_bytes: int
  times_fewer_bytes: float
  workdirs: tuple[pathlib.Path, ...]


def setting_results(outcomes: Sequence[TrialOutcome]) -> list[SettingResult]:
  """Collects trials by setting and corpus, lowest loss first.

  Args:
    outcomes: Outcomes of all trials; failed ones are left out.

  Raises:
    ValueError: If a trial that did not fail has no readable run directory.
  """
  groups: dict[tuple[str, str], list[tuple[TrialOutcome, LoadedRun]]] = {}
  for outcome in outcomes:
    if not outcome.failure:
      run = load_run(outcome.workdir)
      groups.setdefault((outcome.name, run.corpus), []).append((outcome, run))
  planned = collections.Counter(outcome.name for outcome in outcomes)
  corpora = collections.Counter(name for name, _ in groups)
  results = [
    # With several corpora it is unknown which one a failed trial belongs to,
    # so no seed counts as missing there.
    _result(trials, planned[name] if corpora[name] == 1 else len(trials))
    for (name, _), trials in groups.items()
  ]
  return sorted(results, key=lambda result: result.spread.mean)


def _result(
  trials: Sequence[tuple[TrialOutcome, LoadedRun]], num_seeds: int
) -> SettingResult:
  outcome, first = trials[0]
  sent_bytes = [run.total_sent_bytes for _, run in trials]
  return SettingResult(
    name=outcome.name,
    corpus=first.corpus,
    changed=outcome.changed,
    settings=outcome.settings,
    seeds=tuple(trial.seed for trial, _ in trials),
    spread=Spread(tuple(run.validation_loss for _, run in trials)),
    num_seeds=num_seeds,
    sent_bytes=round(statistics.fmean(sent_bytes)),
    times_fewer_bytes=outcome.times_fewer_bytes,
    workdirs=tuple(run.workdir for _, run in trials),
  )
