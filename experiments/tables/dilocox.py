"""DiLoCoX (arXiv 2506.21263): throughput, ablation and the two ratios.

One recipe serves both models, and of each model only the seconds of a step are
fitted. The rest is the plan's bytes over 1 Gbit/s, so the tables show which of
the paper's numbers follow from that and which do not.
"""

import pathlib
from collections.abc import Mapping, Sequence

from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.simulate.published import Figure, load_published
from experiments.tables import dilocox_text
from experiments.tables.dilocox_runs import (
  MODELS,
  RECIPE,
  SEQUENCE_LENGTH,
  PaperRuns,
  Setting,
  tokens_per_s,
)
from experiments.tables.rows import (
  DERIVED,
  FITTED_ELSEWHERE,
  FITTED_HERE,
  Prediction,
  Table,
  TableRow,
)
from experiments.tables.runs import GOODPUT, Pace

UNIT = "tokens/s"
# Settings that the paper's text allows as well, picked to give 357.
PICKED = (
  Setting(num_clusters=10, value_bytes=2),
  Setting(num_clusters=3, tokens=24 * SEQUENCE_LENGTH),
)


def build_tables(folder: pathlib.Path) -> list[Table]:
  """The paper's throughputs, and how they depend on what it leaves open.

  Args:
    folder: Of the published figures.

  Raises:
    ValueError: A file is missing or wrong.
  """
  figures = load_published(folder / "dilocox.json")
  runs = [PaperRuns(figures, model) for model in MODELS]
  return [_throughput(figures, runs), _sensitivity(figures, runs)]


def _throughput(
  figures: Mapping[str, Figure], runs: Sequence[PaperRuns]
) -> Table:
  rows = [row for one in runs for row in _of_model(figures, one)]
  return Table(
    "dilocox_throughput",
    "DiLoCoX: tokens a second over 1 Gbit/s",
    rows,
    dilocox_text.throughput(_facts(runs)),
  )


def _facts(runs: Sequence[PaperRuns]) -> dilocox_text.Facts:
  small, large = runs
  codec_s = large.codec_s()
  factors = {"name": "low_rank+float16", "bits": None, "rank": large.rank}
  waiting = {"sync_interval": large.interval, "method": "diloco", "rule": None}
  half = large.pace("dilocox", sync=waiting, codec=factors)
  return dilocox_text.Facts(
    compute_s=large.interval * large.step_s(),
    exchange_s=large.dilocox().exchange_s,
    dense_s=large.dilocox(is_compressed=False).exchange_s,
    codec_s=codec_s,
    exposed=tokens_per_s(large.dilocox(codec_s=codec_s)),
    half_factors=tokens_per_s(half),
    utilisations=(small.implied_utilisation(), large.implied_utilisation()),
    compressions=(small.cocktail_ratio(), large.cocktail_ratio()),
  )


def _of_model(
  figures: Mapping[str, Figure], one: PaperRuns
) -> list[TableRow | Prediction]:
  fitted = f"step of {one.step_s():.3f} s, fitted on the row of DiLoCoX"

  def row(method: str, pace: Pace, basis: str) -> TableRow | Prediction:
    speed, name = tokens_per_s(pace), f"{one.model}, {method}, throughput"
    if name not in figures:
      basis = f"no figure; {basis}"
      return Prediction(name, speed, UNIT, FITTED_ELSEWHERE, basis)
    return TableRow(figures[name], speed, FITTED_ELSEWHERE, basis)

  rows = [
    row("AllReduce", one.allreduce(), f"{RECIPE}; {fitted}"),
    row("OpenDiLoCo", one.open_diloco(), "fp16, H as DiLoCoX"),
    row("CocktailSGD", one.cocktail_sgd(), "117 times fewer bytes, in turn"),
    TableRow(
      one.published("DiLoCoX"),
      tokens_per_s(one.dilocox()),
      FITTED_HERE,
      f"step of {one.step_s():.3f} s; the exchange is hidden",
    ),
    _without_overlap(figures, one),
    row(
      "DiLoCoX without compression",
      one.dilocox(is_compressed=False),
      "fp32, hidden behind a round",
    ),
  ]
  ratio = figures[f"{one.model}, speed-up over AllReduce"]
  rows.append(TableRow(ratio, one.speed_up(), FITTED_ELSEWHERE, str(RECIPE)))
  for setting in PICKED if one.model == "107B" else ():
    basis = f"{setting}: a setting picked for this ratio"
    rows.append(TableRow(ratio, one.speed_up(setting), FITTED_HERE, basis))
  return rows


def _without_overlap(
  figures: Mapping[str, Figure], one: PaperRuns
) -> TableRow | Prediction:
  method = "DiLoCoX without overlap"
  name = f"{one.model}, {method}, throughput"
  if name not in figures:
    speed = tokens_per_s(one.dilocox(is_hidden=False))
    basis = "no figure; bytes alone, codec free"
    return Prediction(name, speed, UNIT, FITTED_ELSEWHERE, basis)
  codec_s = one.codec_s()
  pace = one.dilocox(is_hidden=False, codec_s=codec_s)
  basis = f"{codec_s:.0f} s of codec a round; bytes alone: "
  basis += f"{tokens_per_s(one.dilocox(is_hidden=False)):.0f}"
  return TableRow(figures[name], tokens_per_s(pace), FITTED_HERE, basis)


SCANNED = [
  Setting(num_clusters, value_bytes, efficiency=efficiency)
  for efficiency in (1.0, GOODPUT)
  for value_bytes in (4, 2)
  for num_clusters in (2, 3, 10, 20)
]
_HEADER = (
  "payload of 1 Gbit/s",
  "value",
  "D",
  "OPT AllReduce",
  "OPT speed-up",
  "107B AllReduce",
  "107B speed-up",
  "107B no compression",
  "107B DiLoCoX exchange",
)


def _sensitivity(
  figures: Mapping[str, Figure], runs: Sequence[PaperRuns]
) -> Table:
  rows, cells = [], []
  for setting in SCANNED:
    found = []
    for one in runs:
      basis = f"{setting}, {setting.efficiency:.3f} of the rate is payload"
      speed = tokens_per_s(one.allreduce(setting), setting)
      ratio = figures[f"{one.model}, speed-up over AllReduce"]
      gain = one.speed_up(setting)
      found.append(
        TableRow(one.published("AllReduce"), speed, FITTED_ELSEWHERE, basis)
      )
      found.append(TableRow(ratio, gain, FITTED_ELSEWHERE, basis))
    large = runs[-1]
    pace = large.dilocox(setting, is_compressed=False)
    speed = tokens_per_s(pace, setting)
    figure = large.published("DiLoCoX without compression")
    found.append(TableRow(figure, speed, FITTED_ELSEWHERE, basis))
    sync_s = large.dilocox(setting).exchange_s
    rows += found
    rows.append(
      Prediction("107B, DiLoCoX, exchange", sync_s, "s", DERIVED, basis)
    )
    cells.append(
      (
        f"{setting.efficiency:.1%}",
        f"{setting.value_bytes} bytes",
        f"{setting.num_clusters}",
        *(f"{row.predicted:.4g} ({row.error})" for row in found),
        f"{sync_s:.0f} s",
      )
    )
  return Table(
    "dilocox_sensitivity",
    "DiLoCoX: what the number of clusters and the precision would change",
    rows,
    dilocox_text.sensitivity(parameter_count(runs[-1].shape)),
    _HEADER,
    cells,
  )
