"""Runs of DiLoCoX's paper (arXiv 2506.21263), with one number fitted.

The paper's throughput of DiLoCoX is that of its devices, so it gives the time
of a step; every other run is then the plan's bytes over a link. `PaperRuns`
are the paper's own. `Large` is the 107B model under every method of this
repository on any links: all share that step, one H and one batch, so that they
differ only in what they exchange and when. Its devices are divided among the
clusters, so a step takes as long for any number of clusters.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping

from dilocox_jax.plan.model.presets import MODEL_PRESETS
from dilocox_jax.plan.model.shapes import flops_per_token
from dilocox_jax.simulate.cluster import Cluster
from experiments.tables.published import Figure, load_published
from experiments.tables.runs import Pace, Rounds, config_of, equal_links
from experiments.tables.table import Fit, Prediction

SEQUENCE_LENGTH = 2048
MODELS = {"OPT-1.3B": "opt_1_3b", "107B": "qwen_107b"}
A800_FLOPS = 312e12  # Of an A800, half precision, as recalled.
RTT_S = 0.04
STEP_BASIS = "step fitted on DiLoCoX's row"
_EVERY_STEP = ("allreduce", "cocktail_sgd")
COUNTS = 2, 8  # Rounds before the steady state, and measured, of `Large`.
_STREAMING = {"num_fragments": 27}  # 26 of three layers, and the tables.
# The name that readers know, and the file in experiments/configs.
METHOD_CONFIGS = {
  "AllReduce": "allreduce",
  "CocktailSGD": "cocktail_sgd",
  "DiLoCo": "diloco",
  "OpenDiLoCo": "open_diloco",
  "MuLoCo": "muloco",
  "SparseLoCo": "sparse_loco",
  "Streaming DiLoCo": "streaming_diloco",
  "Delayed, 4 steps": "delayed",
  "Eager": "eager",
  "DiLoCoX": "dilocox",
  "overlap_loco": "overlap_loco",
}


@dataclasses.dataclass(frozen=True)
class Setting:
  """What the paper leaves open, one for both models.

  Attributes:
    num_clusters: D, the number of clusters; each has one link.
    value_bytes: Bytes of a value that is sent uncompressed: 4 or 2.
    tokens: Tokens of a global step.
    efficiency: Share of 1 Gbit/s that is payload.
  """

  num_clusters: int = 2
  value_bytes: int = 4
  tokens: int = 16 * SEQUENCE_LENGTH
  efficiency: float = 1.0

  def __str__(self):
    precision = "fp32" if self.value_bytes == 4 else "bf16"
    return f"{precision}, D={self.num_clusters}, {self.tokens:,} tokens"

  @property
  def dense(self) -> str:
    """Name of the codec that sends every value."""
    return "float32" if self.value_bytes == 4 else "bfloat16"


RECIPE = Setting()


class PaperRuns:
  """The paper's runs of one model.

  Attributes:
    model: One of `MODELS`.
    setting: What the paper leaves open.
    interval: H (inner steps).
    rank: Rank of DiLoCoX.
    bps: Line rate between clusters (bit/s).
    step_s: Seconds of a step, fitted: DiLoCoX is bound by compute.
  """

  def __init__(
    self, figures: Mapping[str, Figure], model: str, setting: Setting = RECIPE
  ):
    """Fits the step to the published throughput of DiLoCoX.

    Args:
      figures: Figures of the paper.
      model: One of `MODELS`.
      setting: What the paper leaves open.
    """
    self.model, self.setting, self._figures = model, setting, figures
    self.interval = int(figures["sync interval"].value)
    self.rank = int(figures[f"{model}, rank"].value)
    self.bps = figures["bandwidth between clusters"].value * 1e9
    self.step_s = setting.tokens / self.published("DiLoCoX").value

  def published(self, method: str) -> Figure:
    """Returns the published throughput of a method (tokens/s)."""
    return self._figures[f"{self.model}, {method}, throughput"]

  @property
  def shape(self):
    """Shape of the model."""
    return MODEL_PRESETS[MODELS[self.model]]

  def planned(
    self, config: str, num_replicas: int, counts: tuple[int, int], **changes
  ) -> Rounds:
    """Plans the rounds of a method's config with fields changed.

    Args:
      config: Name of the config's file.
      num_replicas: Number of clusters.
      counts: Rounds before the steady state, and rounds that are measured.
      **changes: Values by field, for each section.
    """
    changes["model"] = {"preset": MODELS[self.model]}
    changes["mesh"] = {"num_replicas": num_replicas}
    return Rounds.of(config_of(config, **changes), *counts)

  def pace(self, config: str, codec_s: float = 0.0, **changes) -> Pace:
    """Returns the pace of a method's config with fields changed."""
    count, efficiency = self.setting.num_clusters, self.setting.efficiency
    cluster = equal_links(count, self.bps, rtt_s=0.0, efficiency=efficiency)
    rounds = self.planned(config, count, (3, 4), **changes)
    return rounds.on(cluster, self.step_s, codec_s)

  def tokens_per_s(self, pace: Pace) -> float:
    """Returns the throughput of all clusters together (tokens/s)."""
    return self.setting.tokens / pace.seconds

  @functools.cache  # noqa: B019 - it lives as long as the tables.
  def allreduce(self) -> Pace:
    """Returns the pace of AllReduce: gradients at every step."""
    return self.pace("allreduce", exchange={"codec": self.setting.dense})

  @functools.cache  # noqa: B019 - as above.
  def dilocox(
    self,
    is_hidden: bool = True,
    is_compressed: bool = True,
    codec_s: float = 0.0,
  ) -> Pace:
    """Returns the pace of DiLoCoX, complete or without a component."""
    sync = {"sync_interval": self.interval}
    if not is_hidden:
      sync |= {"method": "diloco", "rule": None}
    codec = f"low_rank(rank={self.rank})+int(bits=4)"
    changes: dict[str, dict] = {"exchange": {"codec": codec}}
    if not is_compressed:
      dense = {"codec": self.setting.dense, "feedback": 0.0}
      changes["exchange"] = dense
    return self.pace("dilocox", codec_s, sync=sync, **changes)

  def open_diloco(self) -> Pace:
    """Returns the pace of OpenDiLoCo: fp16, no overlap, the same H."""
    return self.pace("open_diloco", sync={"sync_interval": self.interval})

  def cocktail_sgd(self) -> Pace:
    """Returns the pace of CocktailSGD: 117 times fewer bytes, every step."""
    mask = "random_mask(fraction=0.15)"
    codec = f"{mask}+top_k(fraction=0.2,indices=bitmap)+int(bits=4)"
    return self.pace("cocktail_sgd", exchange={"codec": codec})

  def speed_up(self) -> float:
    """Returns the speed-up of DiLoCoX over AllReduce."""
    return self.allreduce().seconds / self.dilocox().seconds

  def codec_s(self) -> float:
    """Returns the seconds of a round without overlap that bytes leave open."""
    round_s = self.interval * self.setting.tokens
    round_s /= self.published("DiLoCoX without overlap").value
    return round_s - self.interval * self.dilocox(is_hidden=False).seconds

  def cocktail_ratio(self) -> float:
    """Returns how many times fewer bytes CocktailSGD's row needs."""
    step_s = self.setting.tokens / self.published("CocktailSGD").value
    return self.allreduce().exchange_s / (step_s - self.step_s)

  def implied_utilisation(self) -> float:
    """Returns the share of the devices' peak behind the throughput."""
    devices = self._figures[f"{self.model}, GPUs"].value
    flops = flops_per_token(self.shape, SEQUENCE_LENGTH)
    speed = self.published("DiLoCoX").value
    return speed * flops / (devices * A800_FLOPS)


def predicted(name: str, value: float, unit: str) -> Prediction:
  """Returns a row of a run of `Large`, whose step was fitted."""
  return Prediction(name, value, unit, Fit.ELSEWHERE, STEP_BASIS)


class Large(PaperRuns):
  """Runs of the 107B model under every method of this repository."""

  def __init__(self, folder: pathlib.Path):
    """Reads what is published of the model.

    Args:
      folder: Folder of the published figures.

    Raises:
      ValueError: A file is missing or wrong.
    """
    super().__init__(load_published(folder / "dilocox.json"), "107B")

  @functools.cache  # noqa: B019 - it lives as long as the tables.
  def rounds(self, method: str, num_replicas: int) -> Rounds:
    """Plans the rounds of a method from its config, at the common H."""
    name = METHOD_CONFIGS[method]
    sync = {} if name in _EVERY_STEP else {"sync_interval": self.interval}
    codec = f"low_rank(rank={self.rank})+int(bits=4)"
    exchange = {"codec": codec} if name == "dilocox" else {}
    counts = COUNTS
    if name == "streaming_diloco":
      sync, counts = sync | _STREAMING, (1, 2)
    changes = {"sync": sync, "exchange": exchange}
    return self.planned(name, num_replicas, counts, **changes)

  def on(self, method: str, cluster: Cluster) -> Pace:
    """Returns the pace of a method on given links."""
    return self.rounds(method, cluster.num_replicas).on(cluster, self.step_s)

  def at(self, method: str, num_replicas: int, bps: float) -> Pace:
    """Returns the pace of a method on equal links, with 40 ms between any."""
    return self.on(method, equal_links(num_replicas, bps, rtt_s=RTT_S))
