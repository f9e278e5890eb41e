"""Writes the section of a run's page about the expected gap to AllReduce.

The gap is the loss of the run divided by AllReduce's, minus 1. It is computed
from the settings of the run and from s, the share by which AllReduce's loss
falls when its batch doubles. The program `experiments.gap` measures s. If the
run directory has a copy of its file `gap.json`, s is read from there. Otherwise
s is extrapolated from the size of the model.
"""

import math
from collections.abc import Iterator

from dilocox_jax.checks import (
  in_front,
  json_file,
  of_type,
  require,
  within_limits,
)
from dilocox_jax.config.run import from_saved
from dilocox_jax.config.run_gap import run_gap
from dilocox_jax.gap.expected import ExpectedGap
from dilocox_jax.gap.gain import gain_of_size
from dilocox_jax.gap.law import Estimate
from dilocox_jax.metrics.lines import RecordError
from dilocox_jax.report import units
from dilocox_jax.report.run import LoadedRun
from dilocox_jax.report.tables import markdown_table

GAIN_FILE = "gap.json"  # Written by `experiments.gap`.
_TITLE = "Beside AllReduce"
_ENDS = ("value", "low", "high")  # Fields of an `Estimate`.


def section(run: LoadedRun) -> dict[str, list[str]]:
  """Returns the section of a run's page about the expected gap to AllReduce.

  The gap is the loss of the run divided by AllReduce's, minus 1.

  Returns:
    A dict from the title of the section to its lines in Markdown. It is empty
    if no gap can be expected, e.g. for a run that has not ended or that has one
    replica.

  Raises:
    RecordError: If the run directory has a file `gap.json` (written by
      `experiments.gap`) that is damaged or for another number of parameters.
  """
  try:
    config = from_saved(run.config)
  except ValueError:  # For example a method that only the run has registered.
    return {}
  if not run.finished or not math.isfinite(run.validation_loss):
    return {}
  measured_gain = _measured_gain(run)
  gain = measured_gain or gain_of_size(run.record["parameter_count"])
  expected = run_gap(config, gain)
  if expected is None:
    return {}
  return {_TITLE: list(_lines(run, expected, is_measured=bool(measured_gain)))}


def _lines(
  run: LoadedRun, expected: ExpectedGap, is_measured: bool
) -> Iterator[str]:
  """Yields the lines of the section about the expected gap, in Markdown.

  `is_measured` says whether s was read from `gap.json`.
  """
  loss = run.validation_loss
  kind = "measured" if is_measured else "extrapolated from the size"
  lowest = loss / (1 + expected.high)
  highest = loss / (1 + expected.low)
  rows = [
    (
      "s",
      units.human_share(expected.gain.value),
      f"{100 * expected.gain.low:.1f} to {100 * expected.gain.high:.1f} %",
      kind,
    ),
    (
      "gap to AllReduce",
      f"{100 * expected.gap:+.1f} %",
      f"{100 * expected.low:+.1f} to {100 * expected.high:+.1f} %",
      "expected",
    ),
    ("loss of this run", units.human_loss(loss), "", "measured"),
    (
      "loss of AllReduce",
      units.human_loss(loss / (1 + expected.gap)),
      f"{lowest:.4f} to {highest:.4f}",
      "derived from both",
    ),
  ]
  yield from markdown_table(("quantity", "value", "range", "kind"), rows)
  yield ""
  yield (
    "s is the share by which AllReduce's loss falls when its batch doubles. The"
    " gap follows from s by a law that was fitted to small models. AllReduce"
    " takes as many sequences in a step and as many steps, and each side has"
    " its best rates: rates that were not tuned add to the gap."
  )
  if not is_measured:
    yield ""
    yield (
      f"`experiments.gap` measures s. With a copy of its `{GAIN_FILE}` in this"
      " directory, the next report has that s."
    )
  for note in expected.notes:
    yield ""
    yield note


def _measured_gain(run: LoadedRun) -> Estimate | None:
  """Returns the measured s from `gap.json` with its range; None without a file.

  s is the share by which AllReduce's loss falls when its batch doubles.

  Raises:
    RecordError: If the file is damaged, or is for another number of parameters.
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
      for name, share in vars(gain).items():
        within_limits(name, share, at_least=0, below=1)
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
