"""Predicts throughputs of DiLoCoX (arXiv 2506.21263), and its speed-ups.

The paper leaves some choices open, such as the number of clusters. They are the
same for both models (`RECIPE`). Two kinds of durations are fitted on published
numbers:

- The duration of a step is fitted for each model, on the throughput of DiLoCoX.
  Its exchanges are hidden, so they do not limit this throughput.
- The duration of the codec is fitted on the 107B row of DiLoCoX without
  overlap. No other row uses it.

All other times are those of the sent bytes over 1 Gbit/s.
"""

import dataclasses
import functools
from collections.abc import Iterator

from dilocox_jax.config import to_plan
from dilocox_jax.plan.model.presets import MODEL_PRESETS
from dilocox_jax.plan.model.shapes import flops_per_token
from dilocox_jax.simulate.steps import SteadyState
from experiments.tables.runs import config_of, equal_links, pace
from experiments.tables.table import (
  Figures,
  Fit,
  Prediction,
  Table,
  beside,
  load_published,
)

SEQUENCE_LENGTH = 2048
MODELS = {"OPT-1.3B": "opt_1_3b", "107B": "qwen_107b"}
_A800_FLOPS = 312e12  # Peak of an A800 in half precision (FLOP/s, recalled).


@dataclasses.dataclass(frozen=True)
class Setting:
  """Choices that the paper leaves open, the same for both models.

  Attributes:
    num_clusters: Number of clusters, D; each has one link.
    value_bytes: Bytes of a value that is sent uncompressed: 4 (float32) or 2
      (bfloat16).
    tokens: Number of tokens of all clusters together in one step.
  """

  num_clusters: int = 2
  value_bytes: int = 4
  tokens: int = 16 * SEQUENCE_LENGTH

  def __str__(self):
    precision = "fp32" if self.value_bytes == 4 else "bf16"
    return f"{precision}, D={self.num_clusters}, {self.tokens:,} tokens"


RECIPE = Setting()
# Settings that the paper's text allows as well. They were picked because they
# give about the published 107B speed-up of 357.
PICKED = (
  Setting(num_clusters=10, value_bytes=2),
  Setting(num_clusters=3, tokens=24 * SEQUENCE_LENGTH),
)


class PaperRuns:
  """The paper's runs of one model, simulated with one setting.

  Attributes:
    model: Name of the model, one of `MODELS`.
    setting: Choices that the paper leaves open.
    interval: Inner steps of a round, H.
    rank: Rank of the factors that DiLoCoX sends.
    step_s: Compute of a step (seconds), fitted on the throughput of DiLoCoX.
  """

  def __init__(self, figures: Figures, model: str, setting: Setting = RECIPE):
    """Fits `step_s` on the published throughput of DiLoCoX.

    `figures` has the published numbers of the paper, by name.
    """
    self.model = model
    self.setting = setting
    self._figures = figures
    self.interval = int(figures["sync interval"].value)
    self.rank = int(figures[f"{model}, rank"].value)
    self.step_s = setting.tokens / self.published("DiLoCoX")
    # The codec that sends every value uncompressed.
    self._dense = "float32" if setting.value_bytes == 4 else "bfloat16"

  def published(self, method: str) -> float:
    """Returns the published throughput of a method on this model (tokens/s).

    Args:
      method: Name of the method in the paper, e.g. "DiLoCoX".
    """
    return self._figures[f"{self.model}, {method}, throughput"].value

  def pace(self, method: str, codec_s: float = 0.0, **changes) -> SteadyState:
    """Simulates a run of this model, and returns averages per inner step.

    Args:
      method: Name of the method, as `sync.method` has it.
      codec_s: Duration of encoding and decoding in each exchange (seconds).
        Nothing hides it.
      **changes: Fields that differ from the method's recipe, by section of the
        config. Example: sync={"sync_interval": 125}.
    """
    num_clusters = self.setting.num_clusters
    gbps = self._figures["bandwidth between clusters"].value
    # The links are taken to have no delay, and to carry payload at this rate.
    cluster = equal_links(num_clusters, gbps * 1e9, rtt_s=0.0, efficiency=1.0)
    config = config_of(
      method,
      model={"preset": MODELS[self.model]},
      mesh={"num_replicas": num_clusters},
      **changes,
    )
    traffic = to_plan.traffic(config)
    return pace(traffic, cluster, step_s=self.step_s, codec_s=codec_s)

  def tokens_per_s(self, pace: SteadyState) -> float:
    """Returns the throughput of all clusters together (tokens/s).

    `pace` is a simulated run, as the other methods return it.
    """
    return self.setting.tokens / pace.step_s

  @functools.cache  # noqa: B019 - the cache lives as long as the tables.
  def allreduce(self) -> SteadyState:
    """Simulates AllReduce, which sends uncompressed gradients at every step."""
    return self.pace("allreduce", exchange={"codec": self._dense})

  @functools.cache  # noqa: B019 - as above.
  def dilocox(
    self,
    is_hidden: bool = True,
    codec: str = "low_rank(rank={})+int(bits=4)",
    codec_s: float = 0.0,
  ) -> SteadyState:
    """Simulates DiLoCoX, complete or without one of its components.

    Args:
      is_hidden: Whether an exchange runs beside the steps of the next round. If
        not, it runs after the steps of its own round, as in DiLoCo.
      codec: Name of the codec, in which the rank replaces the braces; "": every
        value is sent uncompressed, without error feedback.
      codec_s: Duration of encoding and decoding in each exchange (seconds).
        Nothing hides it.
    """
    sync = {"sync_interval": self.interval}
    if not is_hidden:
      # The method diloco waits for its exchanges. The other fields keep the
      # values of the recipe of dilocox (`config_of`).
      sync |= {"method": "diloco", "rule": None}
    exchange = {"codec": codec.format(self.rank)}
    if not codec:
      exchange = {"codec": self._dense, "feedback": 0.0}
    return self.pace("dilocox", codec_s, sync=sync, exchange=exchange)

  def open_diloco(self) -> SteadyState:
    """Simulates OpenDiLoCo: fp16, no overlap, and the H of DiLoCoX."""
    return self.pace("open_diloco", sync={"sync_interval": self.interval})

  def cocktail_sgd(self) -> SteadyState:
    """Simulates CocktailSGD, which sends 117 times fewer bytes than fp32.

    Source: Wang et al., 2023, "CocktailSGD", ICML, abstract.
    """
    mask = "random_mask(fraction=0.15)"
    codec = f"{mask}+top_k(fraction=0.2,indices=bitmap)+int(bits=4)"
    return self.pace("cocktail_sgd", exchange={"codec": codec})

  def speed_up(self) -> float:
    """Returns the step time of AllReduce divided by that of DiLoCoX."""
    return self.allreduce().step_s / self.dilocox().step_s

  def codec_s(self) -> float:
    """Fits the time of the codec in a round (seconds) on a published row.

    It is the published time of a round of DiLoCoX without overlap, minus the
    simulated time of its compute and its bytes; 0 if the paper has no such row.
    """
    row = f"{self.model}, DiLoCoX without overlap, throughput"
    if row not in self._figures:
      return 0.0
    round_tokens = self.interval * self.setting.tokens
    published_s = round_tokens / self._figures[row].value
    simulated_s = self.interval * self.dilocox(is_hidden=False).step_s
    return published_s - simulated_s

  def cocktail_ratio(self) -> float:
    """Returns the compression that CocktailSGD's published throughput implies.

    It is the simulated time of AllReduce's exchange, divided by the part of
    CocktailSGD's published step that is not compute (`step_s`).
    """
    step_s = self.setting.tokens / self.published("CocktailSGD")
    return self.allreduce().exchange_s / (step_s - self.step_s)

  def implied_utilization(self) -> float:
    """Returns the share of the GPUs' peak that DiLoCoX achieves, 0 to 1.

    It follows from the published throughput and number of GPUs.
    """
    num_devices = self._figures[f"{self.model}, GPUs"].value
    shape = MODEL_PRESETS[MODELS[self.model]]
    token_flops = flops_per_token(shape, SEQUENCE_LENGTH)
    peak_flops = num_devices * _A800_FLOPS
    return self.published("DiLoCoX") * token_flops / peak_flops


def build_tables() -> list[Table]:
  """Returns one table with throughputs and speed-ups of both models."""
  figures = load_published("dilocox")
  runs = [PaperRuns(figures, model) for model in MODELS]
  small, large = runs
  codec_s = large.codec_s()
  without_compression = large.dilocox(codec="")
  with_exposed_codec = large.dilocox(codec_s=codec_s)
  with_half_factors = large.dilocox(
    is_hidden=False, codec="low_rank(rank={})+float16"
  )
  # The notes of the table (notes.md) have these names in braces.
  numbers = {
    "exchange_s": large.interval * large.dilocox().exchange_s,
    "compute_s": large.interval * large.step_s,
    "dense_s": large.interval * without_compression.exchange_s,
    "small_share": small.implied_utilization(),
    "large_share": large.implied_utilization(),
    "codec_s": codec_s,
    "exposed": large.tokens_per_s(with_exposed_codec),
    "half": large.tokens_per_s(with_half_factors),
    "small_ratio": small.cocktail_ratio(),
    "large_ratio": large.cocktail_ratio(),
  }
  rows = [row for paper in runs for row in _rows(figures, paper)]
  return [Table("dilocox_throughput", rows, numbers)]


def _rows(figures: Figures, paper: PaperRuns) -> Iterator[Prediction]:
  """Yields the predictions of one model: throughputs, then the speed-up.

  For 107B, two more speed-ups follow, one for each setting in `PICKED`. `paper`
  has the setting `RECIPE`.
  """

  def throughput(
    method: str, pace: SteadyState, kind: Fit, basis: str
  ) -> Prediction:
    name = f"{paper.model}, {method}, throughput"
    tokens_per_s = paper.tokens_per_s(pace)
    if name in figures:
      return beside(figures, name, tokens_per_s, kind=kind, basis=basis)
    # The paper has no such number, so there is only a prediction.
    return Prediction(
      name=name,
      predicted=tokens_per_s,
      unit="tokens/s",
      kind=kind,
      basis=basis,
    )

  step = f"step of {paper.step_s:.3f} s"
  yield throughput(
    "AllReduce",
    paper.allreduce(),
    kind=Fit.ELSEWHERE,
    basis=f"{RECIPE}; {step}, fitted on the row of DiLoCoX",
  )
  yield throughput(
    "OpenDiLoCo",
    paper.open_diloco(),
    kind=Fit.ELSEWHERE,
    basis="fp16, H as DiLoCoX",
  )
  yield throughput(
    "CocktailSGD",
    paper.cocktail_sgd(),
    kind=Fit.ELSEWHERE,
    basis="117 times fewer bytes, in turn",
  )
  yield throughput(
    "DiLoCoX",
    paper.dilocox(),
    kind=Fit.HERE,
    basis=f"{step}; the exchange is hidden",
  )
  codec_s = paper.codec_s()
  by_bytes = paper.tokens_per_s(paper.dilocox(is_hidden=False))
  yield throughput(
    "DiLoCoX without overlap",
    paper.dilocox(is_hidden=False, codec_s=codec_s),
    kind=Fit.HERE if codec_s else Fit.ELSEWHERE,
    basis=f"{codec_s:.0f} s of codec a round; bytes alone: {by_bytes:.0f}",
  )
  yield throughput(
    "DiLoCoX without compression",
    paper.dilocox(codec=""),
    kind=Fit.ELSEWHERE,
    basis="fp32, in a round",
  )
  ratio = f"{paper.model}, speed-up over AllReduce"
  yield beside(
    figures,
    ratio,
    paper.speed_up(),
    kind=Fit.ELSEWHERE,
    basis=str(RECIPE),
  )
  if paper.model != "107B":
    return
  for setting in PICKED:
    speed_up = PaperRuns(figures, paper.model, setting).speed_up()
    basis = f"{setting}: a setting picked for this ratio"
    yield beside(figures, ratio, speed_up, kind=Fit.HERE, basis=basis)
