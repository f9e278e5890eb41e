"""The 107B model under every method of the repository, on any links.

All methods share the step that DiLoCoX's published throughput gives, one H and
one batch, so that they differ by what they exchange and when. The devices are
taken to be divided among the clusters, so a step takes as long for any number.
"""

import functools
import pathlib

from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.published import load_published
from experiments.tables.dilocox_runs import RECIPE, PaperRuns
from experiments.tables.runs import Pace, Rounds, config_of, equal_links

RTT_S = 0.04
STEP_BASIS = "step fitted on DiLoCoX's row"
_EVERY_STEP = ("allreduce", "cocktail_sgd")
_STREAMING = {"num_fragments": 27}  # 26 of three layers, and the tables.
METHOD_CONFIGS = {  # What readers call it: its config.
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
}


class Large:
  """PaperRuns of the 107B model."""

  def __init__(self, folder: pathlib.Path):
    """Reads what is published of the model.

    Args:
      folder: Of the published figures.

    Raises:
      ValueError: A file is missing or wrong.
    """
    paper = PaperRuns(load_published(folder / "dilocox.json"), "107B")
    self.interval, self.rank = paper.interval, paper.rank
    self.step_s = paper.step_s()

  def tokens_per_s(self, pace: Pace) -> float:
    """Throughput of all clusters together."""
    return RECIPE.tokens / pace.seconds

  def speed(self, pace: Pace) -> float:
    """Share of the throughput without links, noise and slow sites."""
    return self.step_s / pace.seconds

  @functools.cache  # noqa: B019 - it lives as long as the tables.
  def rounds(self, method: str, num_replicas: int) -> Rounds:
    """The rounds of a method as its config has it, at the common H."""
    name = METHOD_CONFIGS[method]
    sync, codec = {"sync_interval": self.interval}, {}
    if name in _EVERY_STEP:
      sync = {}
    if name == "streaming_diloco":
      sync |= _STREAMING
      return self.varied(name, num_replicas, sync, codec, 1, 2)
    if name == "dilocox":
      codec = {"rank": self.rank}
    return self.varied(name, num_replicas, sync, codec)

  def varied(
    self,
    name: str,
    num_replicas: int,
    sync: dict,
    codec: dict,
    skipped: int = 2,
    counted: int = 8,
  ) -> Rounds:
    """The rounds of a config with fields changed."""
    config = config_of(
      name,
      model={"preset": "qwen_107b"},
      mesh={"num_replicas": num_replicas},
      sync=sync,
      codec=codec,
    )
    return Rounds.of(config, skipped=skipped, counted=counted)

  def on(self, method: str, cluster: Cluster) -> Pace:
    """A method on given links."""
    return self.rounds(method, cluster.num_replicas).on(cluster, self.step_s)

  def at(self, method: str, num_replicas: int, bps: float) -> Pace:
    """A method on equal links, 40 ms between any two."""
    return self.on(method, equal_links(num_replicas, bps, rtt_s=RTT_S))
