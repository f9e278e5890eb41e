"""Writes the constants of the law of the gap (`dilocox_jax/gap/law.json`).

The law predicts the gap of M replicas to AllReduce from the *doublings lost*:
how many times AllReduce's batch may be halved until its loss is that of the
replicas. These constants are computed from runs:

- Lines "doublings lost = a log2 M - b", fitted to runs of DiLoCo.
- The power p of H: the doublings lost are proportional to H^p.
- The gap of DiLoCo, and the factors by which other methods lose more doublings,
  from sweeps (docs/results/runs.csv).

`ELSEWHERE` has the other constants, such as lines of an earlier study.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dilocox_jax.api.measured_gaps import MeasuredGap, measured_gaps
from dilocox_jax.gap.law import PATH
from dilocox_jax.metrics.lines import write_json
from dilocox_jax.plan.schedule.methods import METHODS
from experiments.gaps import law
from experiments.gaps.doublings import Cost, costs
from experiments.gaps.rows import GapRow, by_setting
from experiments.gaps.settings import Setting

# H at which the lines are fitted.
_INTERVAL = 16
_ROWS = "docs/results/gap_law.csv"
_RUNS = "docs/results/runs.csv"
_STUDY = "an earlier study (docs/results/predictions.md)"
# The fields of `Cost` that are fitted, by their names in the file.
_DOUBLINGS = {"last": "by_last_doubling", "curve": "by_curve"}
# A measured factor may be a quarter larger or a fifth smaller elsewhere: it
# comes from one size, one text and one number of replicas.
_FACTOR_RANGE = 1.25

ELSEWHERE: Mapping[str, Any] = {
  "lines": [
    {
      "name": "80 thousand parameters, 96 steps",
      "parameters": 80_000,
      "steps": 96,
      "sync_interval": 8,
      "doublings": "last",
      "slope": 0.74,
      "slope_error": 0.03,
      "offset": 0.48,
      "offset_error": 0.05,
      "correlation": 0.0,
      "kind": "recalled",
      "source": _STUDY,
    },
    {
      "name": "180 and 492 thousand parameters, 384 steps",
      "parameters": 300_000,
      "steps": 384,
      "sync_interval": 16,
      "doublings": "last",
      "slope": 0.6,
      "slope_error": 0.03,
      "offset": 0.35,
      "offset_error": 0.05,
      "correlation": 0.0,
      "kind": "recalled",
      "source": _STUDY,
    },
    {
      # s is 9.44 % from 8 to 16 sequences and 7.2 % from 16 to 32. At these,
      # 4 x 4 with H = 18 (+7.62 %) loses 0.74 doublings, and 8 x 4 with H = 12
      # (+9.34 %) loses 1.20. With H to the power of 0.4 they are 0.71 and 1.34
      # at H = 16.
      "name": "857 thousand parameters, 2,000 steps, two gaps",
      "parameters": 857_216,
      "steps": 2000,
      "sync_interval": 16,
      "doublings": "last",
      "slope": 0.63,
      "slope_error": 0.03,
      "offset": 0.56,
      "offset_error": 0.05,
      "correlation": 0.0,
      "kind": "derived",
      "source": f"{_RUNS}: replicas_main",
    },
  ],
  # From probes of an earlier study: 3.9 % with H = 4 and 8.6 % with H = 16 in
  # 384 steps (a power of 0.55); 5.7, 7.2 and 8.2 % with H = 4, 8 and 16 in 96
  # steps (a power of 0.25).
  "interval_power": {
    "value": 0.4,
    "low": 0.2,
    "high": 0.6,
    "tried": [4, 32],
    "source": _STUDY,
  },
  "most_replicas": 16,
  # Four replicas: 9.6, 8.6, 5.6 and 3.2 % in 192, 384, 768 and 1,536 steps.
  "length_power": {"value": -0.5, "source": _STUDY},
  "unmeasured_factor": {
    "value": 1.2,
    "low": 0.8,
    "high": 2.5,
    "source": "assumed: from DiLoCo to a method that is delayed by a round",
  },
  # Standard deviation of s over six seeds, 26 thousand parameters: 0.015 of s =
  # 0.057 on the C headers, 0.010 of 0.069 on the manual pages, and 0.003 of
  # 0.070 on the standard library. The user's text may be as noisy as the worst.
  "seed_error": {
    "share": 0.25,
    "most": 0.015,
    "source": f"{_ROWS}, docs/results/gap_texts.csv",
  },
  # s = 2.2, 1.1 and 0.54 % with 35 million, 335 million and 2.4 billion
  # parameters, fitted to published gaps with a slope of 0.74. AllReduce gains
  # 9.4 % with 0.86 million (measured).
  "gain_by_size": {
    "parameters": 35_000_000,
    "value": 0.022,
    "power": 1 / 3,
    "most": 0.1,
    "factor": 2.0,
    "smallest": 35_000_000,
    "largest": 2_400_000_000,
    "source": "arXiv 2503.09799, table 4",
  },
}


def content(rows: Sequence[GapRow], field: str) -> dict[str, Any]:
  """Computes the content of `law.json`: the constants by name, as JSON values.

  Args:
    rows: Finished runs of the study. The lines are not fitted to runs that are
      held out to test predictions (`design`).
    field: Name of the loss that is compared, a field of `GapRow`.
  """
  values = dict(ELSEWHERE)
  values["lines"] = [*_fitted_lines(rows, field), *ELSEWHERE["lines"]]
  power = _interval_power(costs(by_setting(rows), field))
  if power:
    values["interval_power"] = power
  values["factors"] = _factors(values["interval_power"]["value"])
  diloco = _plain_muon("diloco")
  assert diloco is not None, "the committed sweeps have DiLoCo at 4 x 4"
  values["diloco_log_gap"] = {
    "value": round(math.log1p(diloco.gap), 5),
    "source": _source(diloco),
  }
  return values


def write(rows: Sequence[GapRow], field: str) -> None:
  """Writes `law.json` with the constants that follow from finished runs.

  `field` is the name of the loss that is compared, a field of `GapRow`.
  """
  write_json(PATH, content(rows, field))


def _fitted_lines(
  rows: Sequence[GapRow], field: str
) -> Iterator[dict[str, Any]]:
  """Yields fitted lines "doublings lost = a log2 M - b", as JSON values.

  The doublings lost say how many times AllReduce's batch may be halved until
  its loss is that of M replicas. There is a line for each model, number of
  steps, number of sequences a step and measure of the doublings lost. Only
  DiLoCo with default options and H = 16 counts.
  """
  for name, doublings in _DOUBLINGS.items():
    for line in law.lines(rows, field, doublings):
      setting = line.setting
      if not _is_plain(setting) or setting.interval != _INTERVAL:
        continue
      (parameters,) = {
        row.parameters for row in rows if row.size == setting.size
      }
      yield {
        "name": f"{setting.size}, {setting.steps} steps,"
        f" {setting.global_batch} sequences",
        "parameters": parameters,
        "steps": setting.steps,
        "sync_interval": setting.interval,
        "doublings": name,
        "slope": round(line.slope.mean, 4),
        "slope_error": round(line.slope.error, 4),
        "offset": round(line.offset.mean, 4),
        "offset_error": round(line.offset.error, 4),
        "correlation": round(line.correlation, 4),
        "kind": "fitted",
        "source": _ROWS,
      }


def _is_plain(setting: Setting) -> bool:
  """Returns whether a setting is DiLoCo with the defaults of `Setting`.

  The model, H, and the numbers of replicas, of steps and of sequences in a step
  may have any value.
  """
  plain = Setting(
    setting.size,
    replicas=setting.replicas,
    batch=setting.batch,
    steps=setting.steps,
    interval=setting.interval,
  )
  return setting == plain and not setting.is_allreduce


def _interval_power(all_costs: Sequence[Cost]) -> dict[str, Any] | None:
  """Computes the power p of "doublings lost are proportional to H^p".

  The doublings lost say how many times AllReduce's batch may be halved until
  its loss is that of the replicas. Only settings of DiLoCo with default options
  and several replicas count. Each of them whose H is not 16 is compared with
  the same setting at H = 16. This gives a value of p if both settings lose more
  than 0 doublings.

  Returns:
    The entry "interval_power" of `law.json`: the mean of these values, and a
    range that covers them and an earlier study. None if no setting gives a
    value.
  """
  lost_by_setting = {
    cost.setting: cost.by_last_doubling
    for cost in all_costs
    if _is_plain(cost.setting) and cost.setting.replicas > 1
  }
  powers = []
  for setting, lost in lost_by_setting.items():
    usual = dataclasses.replace(setting, interval=_INTERVAL)
    # NaN: the setting at H = 16 is not finished.
    usual_lost = lost_by_setting.get(usual, math.nan)
    if setting == usual or not (lost > 0 and usual_lost > 0):
      continue
    ratio = setting.interval / _INTERVAL
    powers.append(math.log(lost / usual_lost) / math.log(ratio))
  if not powers:
    return None
  earlier = ELSEWHERE["interval_power"]
  intervals = [setting.interval for setting in lost_by_setting]
  return {
    "value": round(float(np.mean(powers)), 4),
    "low": round(min(*powers, earlier["low"]), 4),
    "high": round(max(*powers, earlier["high"]), 4),
    "tried": [min(intervals), max(intervals)],
    "source": f"{_ROWS}; {_STUDY}",
  }


def _factors(power: float) -> dict[str, Any]:
  """Computes how many times more doublings each method loses than DiLoCo.

  Replicas lose d doublings if AllReduce ends at their loss after its batch was
  halved d times.

  Args:
    power: Power p by which the gaps are converted to the same H: the doublings
      lost are proportional to H^p.

  Returns:
    The entry "factors" of `law.json`, with the factor and its range for each
    method with rounds whose gap was measured.
  """
  diloco = _plain_muon("diloco")
  factors: dict[str, Any] = {}
  name = "sync.sync_interval"
  for method in METHODS:
    gap = _plain_muon(method)
    # A method without H exchanges at every step, and has no law of rounds.
    if gap is None or diloco is None or name not in gap.settings:
      continue
    # A gap g means d doublings lost with ln(1 + g) = -d ln(1 - s), where
    # AllReduce's loss falls by the share s if its batch doubles.
    doublings_ratio = math.log1p(gap.gap) / math.log1p(diloco.gap)
    # The method may have been measured at another H than DiLoCo.
    interval_ratio = gap.settings[name] / diloco.settings[name]
    value = doublings_ratio * interval_ratio**-power
    # DiLoCo's own factor is 1 and has no range.
    width = 1.0 if method == "diloco" else _FACTOR_RANGE
    factors[method] = {
      "value": round(value, 3),
      "low": round(value / width, 3),
      "high": round(value * width, 3),
      "source": f"{_source(gap)}, H = {gap.settings[name]}",
    }
  return factors


def _source(gap: MeasuredGap) -> str:
  """Returns the file, study and setting of the runs behind a measured gap."""
  return f"{_RUNS}: {gap.study}, {gap.name}"


def _plain_muon(method: str) -> MeasuredGap | None:
  """Returns a method's gap with four replicas and Muon with its usual momentum.

  The result is None if no such gap was measured.
  """
  for gap in measured_gaps(method, num_replicas=4):
    settings = gap.settings
    is_plain = settings["inner.optimizer"] == "muon" and (
      "inner.momentum" not in settings
    )
    if is_plain and gap.num_replicas == 4:
      return gap
  return None
