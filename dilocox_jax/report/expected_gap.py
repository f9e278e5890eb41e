"""The part of a run's page that puts the expected gap beside what came.

The gap follows from s, by how much AllReduce's loss falls when its batch
doubles. `experiments.gap` measures s and writes it to `gap.json`. If the run
directory has a copy of this file, it counts. Otherwise s is extrapolated from
the size of the model.
"""

import math
from collections.abc import Iterator

from dilocox_jax.checks import in_front, json_file, of_type, require
from dilocox_jax.config.run import from_saved
from dilocox_jax.config.run_gap import run_gap
from dilocox_jax.gap.gain import gain_of_size
from dilocox_jax.gap.law import Estimate
from dilocox_jax.metrics.lines import RecordError
from dilocox_jax.report import units
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.report.tables import markdown_table

GAIN_FILE = "gap.json"  # Written by `experiments.gap`.


def expected_gap_lines(run: LoadedRun) -> Iterator[str]:
  """Yields the lines of the part, in Markdown.

  Nothing is yielded for a run without rounds, with one replica, without a
  validation, or with a method that this program does not know.

  Args:
    run: The run.

  Raises:
    RecordError: If `gap.json` is damaged, or is that of another run.
  """
  try:
    config = from_saved(run.config)
  except ValueError:  # For example a method that only the run has registered.
    return
  if not math.isfinite(run.validation_loss):
    return
  gain = _measured_gain(run)
  source = "measured by `experiments.gap`"
  if gain is None:
    gain = gain_of_size(run.record["parameter_count"])
    source = (
      "extrapolated from the size of the model: `experiments.gap` measures it,"
      f" and its `{GAIN_FILE}` in this directory is read"
    )
  found = run_gap(config, gain)
  if found is None:
    return
  loss = run.validation_loss
  rows = [
    ("s", _percent(gain.value), _range(gain.low, gain.high), source),
    (
      "gap to AllReduce",
      _percent(found.gap),
      _range(found.low, found.high),
      "expected from s (fitted law)",
    ),
    ("loss of this run", units.human_loss(loss), "", "measured"),
    (
      "loss of AllReduce",
      units.human_loss(loss / (1 + found.gap)),
      f"{loss / (1 + found.high):.4f} to {loss / (1 + found.low):.4f}",
      "derived from both",
    ),
  ]
  yield from markdown_table(("quantity", "value", "range", "kind"), rows)
  yield ""
  yield (
    "AllReduce has as many sequences in a step and as many steps here, each side"
    " at its best rates. Rates that were not tuned add to the gap."
  )
  for note in found.notes:
    yield ""
    yield note


def _measured_gain(run: LoadedRun) -> Estimate | None:
  """Returns s from `gap.json`; None if the run directory has no such file.

  Args:
    run: The run.

  Raises:
    RecordError: If the file is damaged, or is that of another run.
  """
  path = run.workdir / GAIN_FILE
  if not path.exists():
    return None
  try:
    content = json_file(path)
    with in_front(f"{path} is damaged: "):
      numbers = of_type("gain", content.get("gain"), dict)
      gain = Estimate(
        *(of_type(name, numbers.get(name), float) for name in _ENDS)
      )
    with in_front(f"{path} is of another run: "):
      parameters = content.get("parameters")
      own_parameters = run.record["parameter_count"]
      require(
        parameters == own_parameters,
        f"its model has {parameters} parameters, and this one {own_parameters}",
      )
  except ValueError as error:
    raise RecordError(str(error)) from error
  return gain


_ENDS = ("value", "low", "high")  # Fields of an `Estimate`.


def _percent(share: float) -> str:
  """Returns a share in per cent, e.g. "+3.2 %"."""
  return f"{100 * share:+.1f} %"


def _range(low: float, high: float) -> str:
  """Returns a range in per cent, e.g. "-0.6 to +8.2 %"."""
  return f"{100 * low:+.1f} to {100 * high:+.1f} %"
