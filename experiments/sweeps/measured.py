"""What the committed runs of one to eight replicas say of a method's loss."""

import pathlib
import textwrap
from collections.abc import Iterator

from dilocox_jax.plan.model.presets import MODEL_PRESETS
from dilocox_jax.report import units
from experiments.configs import replicas
from experiments.sweeps import page
from experiments.sweeps.rows import Rows
from experiments.sweeps.runs import runs_of

_ROOT = pathlib.Path(__file__).parents[2]


def gaps(num_replicas: int) -> Iterator[str]:
  """Yields methods with their gaps to AllReduce and the rates that they need.

  Args:
    num_replicas: Number of replicas, M.
  """
  for name in ("main", "one"):
    sweep = replicas.get_config(name).to_dict()
    rows = Rows(_ROOT / sweep["rows"])
    runs = runs_of(sweep, rows.settings)
    configs = {run.name: run.config for run in runs}
    found, times = list(rows.runs.values()), dict.fromkeys(configs, {})
    frame = page.frame(sweep, runs, found, rows, {}, times)
    for setting in frame.settings:
      config, gap = configs[setting.name], units.human_gap(*frame.gap(setting))
      is_tiny = config.model.shape == MODEL_PRESETS["tiny"]
      is_there = is_tiny and config.mesh.num_replicas == num_replicas
      # In fp32 the rates are those of one bit, so its gap says little.
      if is_there and frame.base(setting) and "fp32" not in setting.name:
        inner, outer = config.inner.learning_rate, config.outer.learning_rate
        yield f"{setting.name}: {gap}, inner rate {inner:.3g}, outer {outer:g}"


def words(num_replicas: int) -> str:
  """Returns what is known of losses, for the terminal.

  Args:
    num_replicas: Number of replicas, M.
  """
  known = "; ".join(gaps(num_replicas)) or f"nothing with M = {num_replicas}"
  return textwrap.fill(
    "Losses beside AllReduce's (measured: 0.86 M parameters, 2,000 steps, the"
    " same average on both sides, Muon unless said; replicas x sequences): "
    f"{known}. Under older rules: docs/results.md. Other sizes: not measured.",
    80,
  )
