"""Trains runs whose rounds grow, and compares them with runs of equal rounds.

The settings are in `experiments.gaps.growing`. Some of them change the outer
step instead of the rounds.
"""

import dataclasses
import logging
import pathlib
import statistics
import time
from collections.abc import Hashable, Sequence

from dilocox_jax.data.corpus import Corpus
from dilocox_jax.training import run_text
from experiments.gaps import population, tuning
from experiments.gaps.growing import RATES, SETTINGS
from experiments.gaps.rows import Row, add, read_rows
from experiments.gaps.settings import Rates, Run


@dataclasses.dataclass(frozen=True)
class GrowingRow(Row):
  """A finished run of the study of growing rounds: a line of its CSV file.

  Losses are in nats a token. NaN means that the run diverged.

  Attributes:
    setting: Name of the setting (`growing.SETTINGS`).
    exchanges: Number of outer steps plus number of data-parallel steps.
    sent_bytes: Bytes that one replica sent; 0 for AllReduce, which has a single
      replica.
    inner_rate: Highest inner learning rate.
    outer_rate: Outer learning rate of the first round; 0 for AllReduce.
    seed: Seed of the first parameters and of the order of the sequences.
    corpus: Digest of the text.
    loss_newest: Validation loss of the newest outer parameters.
    loss_average: Validation loss of the average of the outer parameters, by
      which rates are chosen.
    judge_newest: Loss of the newest outer parameters on the judge text
      (held-out text on which nothing is chosen).
    judge_average: Loss of the average on the judge text.
    seconds: Wall time of the JAX program divided by the number of its runs.
  """

  setting: str
  exchanges: int
  sent_bytes: int
  inner_rate: float
  outer_rate: float
  seed: int
  corpus: str
  loss_newest: float
  loss_average: float
  judge_newest: float
  judge_average: float
  seconds: float

  @property
  def rates(self) -> Rates:
    """The learning rates of the run."""
    return Rates(self.inner_rate, self.outer_rate)

  @property
  def key(self) -> Hashable:
    """Values that identify the run in its file."""
    return self.setting, self.rates, self.seed, self.corpus


@dataclasses.dataclass(frozen=True)
class GrowingRuns:
  """Trains the runs of all settings, and reads those that are finished.

  Attributes:
    path: CSV file of finished runs.
    seeds: Seeds on which rates are chosen.
    result_seeds: Seeds that are trained with the best rates, for the results.
    deadline: Value of `time.monotonic` after which no JAX program begins
      (seconds).
  """

  path: pathlib.Path
  seeds: Sequence[int]
  result_seeds: Sequence[int]
  deadline: float

  def choose_rates(self, name: str) -> bool:
    """Trains a setting with each pair of its rates on each of `seeds`.

    Runs that are finished already are not trained again. After the deadline no
    run is started. Returns whether none of these runs is left.
    """
    return all([self._train(name, rates, self.seeds) for rates in RATES[name]])

  def train_results(self, name: str) -> bool:
    """Trains a setting with its best rates, on `result_seeds`.

    The best rates are those with the lowest mean loss over `seeds`. Nothing is
    trained if no pair of rates is finished on all of these seeds without
    divergence. After the deadline no run is started. Returns whether none of
    these runs is left.
    """
    best = self._best_rates(name)
    return best is None or self._train(name, best, self.result_seeds)

  def _train(self, name: str, rates: Rates, seeds: Sequence[int]) -> bool:
    """Trains a setting with some rates, on those of `seeds` not finished yet.

    One JAX program trains them, and each becomes a line of the CSV file. After
    the deadline nothing is trained. Returns whether no run is left.
    """
    done = {row.seed for row in self._rows(name) if row.rates == rates}
    runs = [Run(rates, seed) for seed in seeds if seed not in done]
    if not runs:
      return True
    if time.monotonic() > self.deadline:
      return False
    setting = SETTINGS[name]
    text = _text(name)
    begin = time.monotonic()
    losses = population.train(setting, runs, text)
    seconds = (time.monotonic() - begin) / len(runs)
    logging.info("%s %s: %.1f s a run", name, tuple(rates), seconds)
    sent_bytes = population.sent_bytes(setting)
    if setting.is_allreduce:
      sent_bytes = 0  # Its single replica has none to send to.
    rows = [
      GrowingRow(
        setting=name,
        exchanges=setting.num_exchanges,
        sent_bytes=sent_bytes,
        inner_rate=rates.inner,
        outer_rate=rates.outer,
        seed=run.seed,
        corpus=text.digest,
        loss_newest=run_losses.newest,
        loss_average=run_losses.average,
        judge_newest=run_losses.judge_newest,
        judge_average=run_losses.judge_average,
        seconds=round(seconds, 1),
      )
      for run, run_losses in zip(runs, losses, strict=True)
    ]
    add(self.path, rows)
    return True

  def _rows(self, name: str) -> list[GrowingRow]:
    """Returns the finished runs of a setting."""
    rows = read_rows(self.path, GrowingRow)
    return [row for row in rows if row.setting == name]

  def _best_rates(self, name: str) -> Rates | None:
    """Returns the rates with the lowest mean loss over `seeds`.

    None if no rates were trained on all of these seeds without divergence.
    """
    return tuning.lowest_mean(
      ((row.rates, row.seed, row.loss_average) for row in self._rows(name)),
      self.seeds,
    )

  def _results(self, name: str) -> dict[int, GrowingRow]:
    """Returns the runs with the best rates on `result_seeds`, by seed."""
    best = self._best_rates(name)
    return {
      row.seed: row
      for row in self._rows(name)
      if row.rates == best and row.seed in self.result_seeds
    }

  def table(self, names: Sequence[str]) -> str:
    """Returns a Markdown table of losses on the judge text.

    Beside each loss it has the change from the setting `constant` (per cent).
    The change is a mean over the seeds that both settings have, with its
    standard error. With fewer than two such seeds it is left out.

    Args:
      names: Names of the settings. Settings without results are left out.
    """
    lines = [
      "| setting | exchanges | MB sent | rates | average: loss, change |"
      " newest: loss, change |",
      "|---|---|---|---|---|---|",
    ]
    constant = self._results("constant")
    for name in names:
      results = self._results(name)
      if not results:
        continue
      # All results of a setting have the same rates and bytes.
      row = next(iter(results.values()))
      lines.append(
        f"| {name} | {row.exchanges} | {row.sent_bytes / 1e6:.2f} | "
        f"{row.inner_rate:g}, {row.outer_rate:g} | "
        f"{_compared(results, constant, 'judge_average')} | "
        f"{_compared(results, constant, 'judge_newest')} |"
      )
    return "\n".join(lines)


def _compared(
  results: dict[int, GrowingRow], constant: dict[int, GrowingRow], loss: str
) -> str:
  """Returns a mean loss and its change, e.g. "2.0312, +1.20 ± 0.15 %".

  The change from the results of `constant` is left out without two common
  seeds.
  """
  mean = statistics.fmean(getattr(row, loss) for row in results.values())
  changes = [
    100 * (getattr(results[seed], loss) / getattr(constant[seed], loss) - 1)
    for seed in results
    if seed in constant
  ]
  if len(changes) < 2:
    return f"{mean:.4f}"
  error = statistics.stdev(changes) / len(changes) ** 0.5
  return f"{mean:.4f}, {statistics.fmean(changes):+.2f} ± {error:.2f} %"


def _text(name: str) -> Corpus:
  """Reads the text on which a setting is trained and evaluated."""
  run = Run(Rates(inner=1.0, outer=1.0), seed=0)
  return run_text.corpus(SETTINGS[name].config(run))
