"""Trains what a list of settings still needs, and writes lines."""

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
  """Trains a list of settings.

  Attributes:
    path: CSV file of finished runs.
    groups: The settings.
    name: Name of the list.
    deadline: Value of `time.monotonic` after which no program begins.
    largest_population: Most runs of a program; None: no limit.
  """

  path: pathlib.Path
  groups: Sequence[Group]
  name: str = "cpu"
  deadline: float | None = None
  largest_population: int | None = None

  def train_all(self) -> bool:
    """Trains what is missing, setting by setting.

    Settings that another program trains are left to it.

    Returns:
      Whether no run is left.
    """
    settings = [each for group in self.groups for each in group.settings]
    for setting in settings:
      lock = rows.lock_path(self.path, setting.name)
      try:
        with locked(lock, f"another program trains {setting.name}"):
          self._train(setting, settings)
      except BusyError as error:
        logging.info("%s", error)
      if self._is_late():
        break
    return plan.amount(settings, rows.read(self.path), self.name).left == 0

  def _is_late(self) -> bool:
    return self.deadline is not None and time.monotonic() > self.deadline

  def _train(self, setting: Setting, settings: Sequence[Setting]) -> None:
    """Trains a setting until it needs nothing, or time is over."""
    text = _text(setting.source)
    while not self._is_late():
      known = rows.by_setting(rows.read(self.path)).get(setting, [])
      known = [row for row in known if row.corpus == text.digest]
      runs = tuning.missing_runs(setting, known).runs
      if not runs:
        return
      rows.add(self.path, self._finished(setting, runs, text))
      self._report(settings)

  def _finished(
    self, setting: Setting, runs: Sequence[Run], text: Corpus
  ) -> list[GapRow]:
    """Trains the first of some runs and returns their lines."""
    chosen = list(runs[: self.largest_population])
    begin = time.monotonic()
    losses = population.train(setting, chosen, text)
    seconds = (time.monotonic() - begin) / len(chosen)
    logging.info(
      "%s: %d runs, %.1f s each, %.1f GFLOP/s",
      setting.name,
      len(chosen),
      seconds,
      plan.run_flops(setting) / seconds / 1e9,
    )
    return [
      _row(setting, run, loss, text, seconds)
      for run, loss in zip(chosen, losses, strict=True)
    ]

  def _report(self, settings: Sequence[Setting]) -> None:
    needed = plan.amount(settings, rows.read(self.path), self.name)
    logging.info(
      "%d runs done, about %d left: %.1f hours of one process",
      needed.done,
      needed.left,
      needed.seconds / 3600,
    )


def _row(
  setting: Setting,
  run: Run,
  losses: population.Losses,
  text: Corpus,
  seconds: float,
) -> GapRow:
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


@functools.cache
def _text(source: str) -> Corpus:
  """Returns the text of settings with a source."""
  any_setting = Setting("5k", replicas=1, batch=1, steps=4, source=source)
  config = any_setting.config(Run(Rates(inner=1.0), seed=0))
  return run_text.corpus(config)


@functools.cache
def _platform() -> str:
  return f"{jax.default_backend()} ({jax.devices()[0].device_kind})"


@functools.cache
def _revision() -> str:
  """Returns the revision of the source code when the program began."""
  return source_revision() or ""
