"""Trains the runs that a list of settings still needs, and adds them to a file.

Each finished run is one line of a CSV file (`rows.GapRow`).
"""

import dataclasses
import functools
import importlib.metadata
import logging
import pathlib
import time
from collections.abc import Sequence

import jax

from dilocox_jax.data.corpus import Corpus
from dilocox_jax.metrics.work_directory import (
  BusyError,
  locked,
  source_revision,
)
from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.training import run_text
from experiments.gaps import plan, population, rows, tuning
from experiments.gaps.design import Group
from experiments.gaps.rows import GapRow
from experiments.gaps.settings import Rates, Run, Setting


@dataclasses.dataclass(frozen=True)
class Work:
  """Trains the runs that a list of settings still needs.

  Attributes:
    path: CSV file of finished runs.
    groups: The settings, in groups.
    name: Name of the list (`design.DESIGNS`).
    deadline: Value of `time.monotonic` after which no JAX program begins
      (seconds); None: no limit.
    largest_population: Most runs that one JAX program trains; None: no limit.
  """

  path: pathlib.Path
  groups: Sequence[Group]
  name: str = "cpu"
  deadline: float | None = None
  largest_population: int | None = None

  def train_all(self) -> bool:
    """Trains the missing runs, setting by setting, until the deadline.

    A setting that another process trains at this time is left out.

    Returns:
      Whether no run of the list is left.
    """
    settings = [setting for group in self.groups for setting in group.settings]
    for setting in settings:
      lock = rows.lock_path(self.path, setting.name)
      try:
        with locked(lock, f"another program trains {setting.name}"):
          self._train(setting, settings)
      except BusyError as error:
        logging.info("%s", error)
      if self._is_late():
        break
    return self._needed(settings).num_left == 0

  def _is_late(self) -> bool:
    """Returns whether the deadline has passed."""
    return self.deadline is not None and time.monotonic() > self.deadline

  def _needed(self, settings: Sequence[Setting]) -> plan.TrainingNeeded:
    """Estimates how much training some settings still need.

    As in `_train`, only finished runs on this machine's text count.
    """
    own_rows = _on_own_text(rows.read(self.path), settings)
    return plan.training_needed(settings, own_rows, self.name)

  def _train(self, setting: Setting, settings: Sequence[Setting]) -> None:
    """Trains a setting until it needs no more runs, or the deadline passes."""
    text = _text(setting.source)
    # Only finished runs on this machine's text count. But a search may begin at
    # the best rates of runs on another text.
    while not self._is_late():
      all_rows = rows.read(self.path)
      runs = tuning.missing_runs(
        setting,
        _on_own_text(all_rows, [setting]),
        start=tuning.start_point(setting, rows.by_setting(all_rows)),
      ).runs
      if not runs:
        return
      rows.add(self.path, self._train_population(setting, runs, text))
      self._log_progress(settings)

  def _train_population(
    self, setting: Setting, runs: Sequence[Run], text: Corpus
  ) -> list[GapRow]:
    """Trains the first `largest_population` of some runs as one program.

    Returns the line of the CSV file for each run that was trained.
    """
    population_runs = list(runs[: self.largest_population])
    begin = time.monotonic()
    losses = population.train(setting, population_runs, text)
    seconds_per_run = (time.monotonic() - begin) / len(population_runs)
    logging.info(
      "%s: %d runs, %.1f s each, %.1f GFLOP/s",
      setting.name,
      len(population_runs),
      seconds_per_run,
      plan.run_operations(setting) / seconds_per_run / 1e9,
    )
    return [
      _row(setting, run, run_losses, text=text, seconds=seconds_per_run)
      for run, run_losses in zip(population_runs, losses, strict=True)
    ]

  def _log_progress(self, settings: Sequence[Setting]) -> None:
    """Logs how many runs of the settings are done and left."""
    needed = self._needed(settings)
    logging.info(
      "%d runs done, about %d left: %.1f hours of one process",
      needed.num_done,
      needed.num_left,
      needed.left_s / 3600,
    )


def _row(
  setting: Setting,
  run: Run,
  losses: population.Losses,
  text: Corpus,
  seconds: float,
) -> GapRow:
  """Returns the line of the CSV file for a finished run."""
  config = setting.config(run)
  return GapRow(
    **dataclasses.asdict(setting),
    method=setting.method,
    parameters=parameter_count(config.model.shape),
    optimizer=config.inner.optimizer,
    inner_rate=run.rates.inner,
    outer_rate=run.rates.outer,
    seed=run.seed,
    corpus=text.digest,
    tokens=setting.tokens,
    sent_bytes=population.sent_bytes(setting),
    loss_newest=losses.newest,
    loss_average=losses.average,
    judge_newest=losses.judge_newest,
    judge_average=losses.judge_average,
    seconds=round(seconds, 2),
    platform=_platform(),
    jax=importlib.metadata.version("jax"),
    revision=_revision(),
  )


def _on_own_text(
  all_rows: Sequence[GapRow], settings: Sequence[Setting]
) -> list[GapRow]:
  """Returns the rows of some settings that were trained on this machine's text.

  Another machine may have another text of the same name.
  """
  digests = {setting: _text(setting.source).digest for setting in settings}
  return [row for row in all_rows if digests.get(row.setting) == row.corpus]


@functools.cache
def _text(source: str) -> Corpus:
  """Reads the text that a name stands for (`Setting.source`)."""
  any_setting = Setting("5k", replicas=1, batch=1, steps=4, source=source)
  config = any_setting.config(Run(Rates(inner=1.0), seed=0))
  return run_text.corpus(config)


@functools.cache
def _platform() -> str:
  """Returns the backend of JAX and its kind of device, e.g. "cpu (cpu)"."""
  return f"{jax.default_backend()} ({jax.devices()[0].device_kind})"


@functools.cache
def _revision() -> str:
  """Returns the revision of the source code; empty if unknown."""
  # The result is cached, because the code may change while this process runs.
  return source_revision() or ""
