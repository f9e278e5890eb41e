"""DiLoCoX (arXiv 2506.21263): throughput, ablation and the two ratios.

One recipe is used for both models, and only the seconds of a step are fitted,
once for each model. The rest is the plan's bytes over 1 Gbit/s. So the tables
show which of the paper's numbers follow from that and which do not.
"""

import pathlib
from collections.abc import Mapping, Sequence

from dilocox_jax.plan.model.presets import MODEL_PRESETS
from dilocox_jax.plan.model.shapes import parameter_count
from experiments.tables.dilocox_runs import (
  MODELS,
  RECIPE,
  SEQUENCE_LENGTH,
  PaperRuns,
  Setting,
)
from experiments.tables.published import Figure, load_published
from experiments.tables.runs import GOODPUT
from experiments.tables.table import Fit, Prediction, Table, beside, described

UNIT = "tokens/s"
_FP16 = "fp16, H as DiLoCoX"
_COCKTAIL = "117 times fewer bytes, in turn"
_HIDDEN = "the exchange is hidden"
_FREE_CODEC = "bytes alone, codec free"
_DENSE = "fp32, hidden behind a round"
# Settings that the paper's text allows as well, picked to give 357.
PICKED = (
  Setting(num_clusters=10, value_bytes=2),
  Setting(num_clusters=3, tokens=24 * SEQUENCE_LENGTH),
)


def build_tables(folder: pathlib.Path) -> list[Table]:
  """Returns the throughputs, and how they depend on what the paper omits.

  Args:
    folder: Folder of the published figures.

  Raises:
    ValueError: A file is missing or wrong.
  """
  figures = load_published(folder / "dilocox.json")
  runs = [PaperRuns(figures, model) for model in MODELS]
  return [_throughput(figures, runs), _sensitivity(figures)]


def _throughput(
  figures: Mapping[str, Figure], runs: Sequence[PaperRuns]
) -> Table:
  small, large = runs
  codec_s = large.codec_s()
  factors = {"codec": f"low_rank(rank={large.rank})+float16"}
  waiting = {"sync_interval": large.interval, "method": "diloco", "rule": None}
  half = large.pace("dilocox", sync=waiting, exchange=factors)
  return described(
    "dilocox_throughput",
    [row for paper in runs for row in _of_model(figures, paper)],
    exchange_s=large.dilocox().exchange_s,
    compute_s=large.interval * large.step_s,
    dense_s=large.dilocox(is_compressed=False).exchange_s,
    small_share=small.implied_utilisation(),
    large_share=large.implied_utilisation(),
    codec_s=codec_s,
    exposed=large.tokens_per_s(large.dilocox(codec_s=codec_s)),
    half=large.tokens_per_s(half),
    small_ratio=small.cocktail_ratio(),
    large_ratio=large.cocktail_ratio(),
  )


def _of_model(
  figures: Mapping[str, Figure], paper: PaperRuns
) -> list[Prediction]:
  step = f"step of {paper.step_s:.3f} s"
  recipe = f"{RECIPE}; {step}, fitted on the row of DiLoCoX"
  bytes_alone = paper.dilocox(is_hidden=False)
  dense = paper.dilocox(is_compressed=False)
  exposed, how, reason = bytes_alone, Fit.ELSEWHERE, _FREE_CODEC
  without = "DiLoCoX without overlap"
  if f"{paper.model}, {without}, throughput" in figures:
    codec_s = paper.codec_s()
    exposed = paper.dilocox(is_hidden=False, codec_s=codec_s)
    alone = f"bytes alone: {paper.tokens_per_s(bytes_alone):.0f}"
    how, reason = Fit.HERE, f"{codec_s:.0f} s of codec a round; {alone}"
  rows = []
  for method, pace, kind, basis in (
    ("AllReduce", paper.allreduce(), Fit.ELSEWHERE, recipe),
    ("OpenDiLoCo", paper.open_diloco(), Fit.ELSEWHERE, _FP16),
    ("CocktailSGD", paper.cocktail_sgd(), Fit.ELSEWHERE, _COCKTAIL),
    ("DiLoCoX", paper.dilocox(), Fit.HERE, f"{step}; {_HIDDEN}"),
    (without, exposed, how, reason),
    ("DiLoCoX without compression", dense, Fit.ELSEWHERE, _DENSE),
  ):
    speed = paper.tokens_per_s(pace)
    name = f"{paper.model}, {method}, throughput"
    if name in figures:
      rows.append(beside(figures[name], speed, kind, basis))
    else:
      basis = f"no figure; {basis}"
      rows.append(Prediction(name, speed, UNIT, kind, basis))
  ratio = figures[f"{paper.model}, speed-up over AllReduce"]
  rows.append(beside(ratio, paper.speed_up(), Fit.ELSEWHERE, str(RECIPE)))
  for setting in PICKED if paper.model == "107B" else ():
    basis = f"{setting}: a setting picked for this ratio"
    speed_up = PaperRuns(figures, paper.model, setting).speed_up()
    rows.append(beside(ratio, speed_up, Fit.HERE, basis))
  return rows


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


def _sensitivity(figures: Mapping[str, Figure]) -> Table:
  rows, cells = [], []
  for setting in SCANNED:
    small, large = (PaperRuns(figures, model, setting) for model in MODELS)
    basis = f"{setting}, {setting.efficiency:.3f} of the rate is payload"
    values = {}
    for paper in (small, large):
      speed = paper.tokens_per_s(paper.allreduce())
      values[f"{paper.model}, AllReduce, throughput"] = speed
      ratio = f"{paper.model}, speed-up over AllReduce"
      values[ratio] = paper.speed_up()
    dense = large.dilocox(is_compressed=False)
    name = "107B, DiLoCoX without compression, throughput"
    values[name] = large.tokens_per_s(dense)
    compared = [
      beside(figures[name], value, Fit.ELSEWHERE, basis)
      for name, value in values.items()
    ]
    sync_s = large.dilocox().exchange_s
    exchange = "107B, DiLoCoX, exchange"
    rows += [*compared, Prediction(exchange, sync_s, "s", Fit.NONE, basis)]
    cells.append(
      (
        f"{setting.efficiency:.1%}",
        f"{setting.value_bytes} bytes",
        f"{setting.num_clusters}",
        *(f"{row.predicted:.4g} ({row.error})" for row in compared),
        f"{sync_s:.0f} s",
      )
    )
  billions = parameter_count(MODEL_PRESETS[MODELS["107B"]]) / 1e9
  name = "dilocox_sensitivity"
  return described(name, rows, _HEADER, cells, billions=billions)
