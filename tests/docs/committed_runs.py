"""Prints losses, gaps and bytes of committed runs as the pages print them."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence

from dilocox_jax.config import RunConfig
from dilocox_jax.plan.model.shapes import parameter_count
from dilocox_jax.report import units
from dilocox_jax.report.frame import Frame, Setting
from experiments.configs import replicas
from experiments.sweeps import page
from experiments.sweeps.finished import Rows
from experiments.sweeps.runs import runs_of
from experiments.sweeps.tables import COMMITTED

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "docs/results"


@dataclasses.dataclass(frozen=True)
class Runs:
  """Committed runs of one sweep or of several.

  Attributes:
    frame: Settings with the losses of their seeds.
    configs: Config of each setting, by its name.
  """

  frame: Frame
  configs: Mapping[str, RunConfig]

  def setting(self, name: str) -> Setting:
    """Returns the setting with a name."""
    (found,) = [each for each in self.frame.settings if each.name == name]
    return found

  def losses(self, name: str) -> list[float]:
    """Returns the losses of the seeds of a setting."""
    return self.setting(name).losses

  def loss(self, name: str) -> str:
    """Prints a mean loss with its error, as "1.2546 ± 0.0007"."""
    setting = self.setting(name)
    return units.human_loss(setting.loss, page_error(setting.losses))

  def gap_and_error(self, name: str, base: str = "") -> tuple[float, float]:
    """Returns a gap and its error.

    Args:
      name: Name of the setting.
      base: Name of its baseline; by default that of the sweep.
    """
    setting = self.setting(name)
    if base:
      setting = dataclasses.replace(setting, baseline=base)
    return self.frame.gap(setting)

  def gap(self, name: str, base: str = "") -> str:
    """Prints a gap with its error, as "+0.81 ± 0.16 %"."""
    return units.human_gap(*self.gap_and_error(name, base))

  def sent(self, name: str) -> str:
    """Prints the bytes that a replica sent, as "15.4 MB"."""
    return units.human_bytes(self.setting(name).sent_bytes)

  def parameters(self, name: str) -> int:
    """Returns how many parameters the model of a setting has."""
    return parameter_count(self.configs[name].model.shape)

  def rounds(self, name: str) -> tuple[int, int, int]:
    """Returns H, P and tau of a setting."""
    schedule = self.configs[name].sync.named.schedule
    return (
      schedule.sync_interval,
      schedule.num_fragments,
      schedule.overlap_steps,
    )


def page_error(losses: Sequence[float]) -> float:
  """Returns the standard error of a mean, by the textbook's formula."""
  count = len(losses)
  mean = sum(losses) / count
  squares = sum((loss - mean) ** 2 for loss in losses)
  return (squares / (count - 1) / count) ** 0.5


@functools.cache
def equal() -> Runs:
  """Returns the runs of 2,000 steps under equal conditions."""
  main = replicas.get_config("main").to_dict()
  cpu = replicas.get_config("cpu").to_dict()
  time = replicas.get_config("equal_time").to_dict()
  return _runs(
    {"replicas_main": main, "replicas_cpu": cpu, "replicas_equal_time": time}
  )


def _runs(sweeps: Mapping[str, Mapping]) -> Runs:
  settings = []
  configs = {}
  for study, sweep in sweeps.items():
    rows = Rows(COMMITTED, study)
    runs = runs_of(sweep, rows.settings)
    names = [run.name for run in runs]
    found = list(rows.runs.values())
    without_times = dict.fromkeys(names, {})
    frame = page.frame(sweep, runs, found, rows, {}, without_times)
    settings += frame.settings
    configs |= {run.name: run.config for run in reversed(runs)}
  return Runs(Frame(settings), configs)


@functools.cache
def links() -> list[Mapping]:
  """Returns the rows that were measured over throttled links."""
  return json.loads((RESULTS / "links.json").read_text())
