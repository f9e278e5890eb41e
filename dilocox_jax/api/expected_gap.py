"""The gap to AllReduce that this repository's own sweeps lead one to expect.

The figures were measured with 0.86 million parameters, 2000 inner steps and two
replicas (`data/measured_gaps.csv`). For any other run they are an
extrapolation, and every answer says how far it is from what was measured.
"""

import csv
import dataclasses
import functools
import importlib.resources
import math
from collections.abc import Iterable, Mapping

import numpy as np

from dilocox_jax.config import RunConfig
from dilocox_jax.plan.model.shapes import parameter_count

MEASURED_WITH = "0.86 M parameters, 2000 steps, 2 replicas"
_MEASURED_PARAMETERS, _MEASURED_STEPS = 857_216, 2000
# Measured at three values of H, so it says how a gap grows with H.
_REFERENCE = ("open_diloco", "adamw", "float16", "")
_Setting = tuple[str, str, str, str]
_Row = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ExpectedGap:
  """How much higher the loss is expected to be than that of AllReduce.

  Attributes:
    percent: The gap to AllReduce with the same inner optimizer (per cent).
    basis: How the number follows from measurements.
    is_extrapolated: Whether the run lies outside of what was measured.
  """

  percent: float
  basis: str
  is_extrapolated: bool


def expected_gap(config: RunConfig) -> ExpectedGap | None:
  """Returns the expected gap; None if nothing like the run was measured.

  Between two measured values of H the gap is linear in log H, and beyond them
  it goes on with the slope of the nearest two. Where there is one value only,
  the gap grows with H in the same ratio as that of OpenDiLoCo.

  Args:
    config: Config of the run.
  """
  found = _nearest(config)
  if found is None:
    return None
  key, remarks = found
  curve = _curves()[key]
  interval = config.sync.named.schedule.sync_interval
  lowest, highest = min(curve), max(curve)
  row = _rows_of(key)[_closest(curve, interval)]
  if interval in curve:
    how = f"measured at H = {interval}"
  elif lowest < interval < highest:
    how = f"interpolated between H = {lowest} and {highest}"
  else:
    how = f"extrapolated from H = {row['sync_interval']}"
  outside = not lowest <= interval <= highest
  remarks += _differences(config, row)
  return ExpectedGap(
    _gap(curve, interval),
    f"{', '.join([how, *remarks])} ({row['source']})",
    outside or bool(remarks) or not _is_like_the_sweep(config),
  )


def tuned_outer(method: str, codec: str, interval: int) -> dict[str, float]:
  """Returns the outer rate and momentum with which a gap was measured.

  Those of the nearest H that was measured, by dotted names; empty for a method
  without an outer optimizer, or one that was not measured.

  Args:
    method: Name of the method.
    codec: Name of its codec; "": any.
    interval: H (inner steps).
  """
  rows = {
    int(row["sync_interval"]): row
    for row in reversed(_rows())
    if row["method"] == method and not row["variant"]
    if row["codec"].split()[0] == codec or not codec
    if row["outer_learning_rate"]
  }
  if not rows:
    return {}
  row = rows[_closest(rows, interval)]
  names = "outer.learning_rate", "outer.momentum"
  return {name: float(row[name.replace(".", "_")]) for name in names}


def _closest(intervals: Iterable[int], interval: int) -> int:
  """Returns the measured H whose ratio to the run's H is nearest to 1."""
  return min(intervals, key=lambda h: (abs(math.log(h / interval)), h))


def _differences(config: RunConfig, row: _Row) -> list[str]:
  """Says in what a run differs from the one that was measured."""
  pairs = [
    ("outer rate", config.outer.learning_rate, row["outer_learning_rate"]),
    ("outer momentum", config.outer.momentum, row["outer_momentum"]),
  ]
  if config.sync.method == "streaming_diloco":  # Elsewhere it follows from H.
    overlap_steps = config.sync.named.schedule.overlap_steps
    pairs.append(("tau", overlap_steps, row["overlap_steps"]))
  if row["rank_share"] and config.codec.rank:
    share = config.model.shape.model_dim / config.codec.rank
    pairs.append(("width over rank", share, row["rank_share"]))
  return [
    f"with {name} {float(measured):g} instead of {own:g}"
    for name, own, measured in pairs
    if measured and float(measured) != own
  ]


def _variant(config: RunConfig) -> str:
  """Returns how a run differs from its method's own setting, as in the file."""
  if config.sync.warm_start != "none":
    return "after a warm start"
  if config.outer.average_power:
    return "with an average"
  if config.sync.method == "dilocox" and config.sync.named.rule == "reset":
    return "with the rule reset"
  return ""


def _is_like_the_sweep(config: RunConfig) -> bool:
  same_size = parameter_count(config.model.shape) == _MEASURED_PARAMETERS
  return (
    same_size
    and config.total_steps == _MEASURED_STEPS
    and config.mesh.num_replicas == 2
  )


def _nearest(config: RunConfig) -> tuple[_Setting, list[str]] | None:
  """Returns the measured setting of a run, and in what the run differs."""
  method, inner = config.sync.method, config.inner.optimizer
  name, bits = config.codec.name, config.codec.bits
  variant = _variant(config)
  for measured in dict.fromkeys((variant, "")):
    remarks = [] if measured == variant else [f"but not {variant}"]
    own = f"{name} {bits} bits" if bits else name
    if (method, inner, own, measured) in _curves():
      return (method, inner, own, measured), remarks
    for fewer in range(bits - 1 if bits else 0, 0, -1):
      key = method, inner, f"{name} {fewer} bits", measured
      if key in _curves():
        return key, [*remarks, f"with {fewer} bits instead of {bits}"]
  return None


def _gap(curve: Mapping[int, float], interval: int) -> float:
  if len(curve) > 1:
    return _at(curve, interval)
  (measured, gap), reference = next(iter(curve.items())), _curves()[_REFERENCE]
  # An exchange of every step has no rounds that could be longer.
  if measured == 1:
    return gap
  return gap * _at(reference, interval) / _at(reference, measured)


def _at(curve: Mapping[int, float], interval: int) -> float:
  """Returns a gap between or beyond at least two measured ones (per cent)."""
  places = np.log2(sorted(curve))
  gaps = np.array([curve[h] for h in sorted(curve)])
  place = np.log2(interval)
  left = int(np.clip(np.searchsorted(places, place) - 1, 0, len(gaps) - 2))
  slope = (gaps[left + 1] - gaps[left]) / (places[left + 1] - places[left])
  return max(float(gaps[left] + slope * (place - places[left])), 0.0)


@functools.cache
def _rows() -> list[dict[str, str]]:
  folder = importlib.resources.files("dilocox_jax.api").joinpath("data")
  text = folder.joinpath("measured_gaps.csv").read_text("utf-8")
  return list(csv.DictReader(text.splitlines()))


def _key(row: _Row) -> _Setting:
  return row["method"], row["inner_optimizer"], row["codec"], row["variant"]


@functools.cache
def _rows_of(key: _Setting) -> dict[int, _Row]:
  """Measured rows of a setting, by H."""
  return {int(row["sync_interval"]): row for row in _rows() if _key(row) == key}


@functools.cache
def _curves() -> dict[_Setting, dict[int, float]]:
  """Gaps (per cent) by H, by setting."""
  return {
    key: {h: float(row["gap_percent"]) for h, row in _rows_of(key).items()}
    for key in map(_key, _rows())
  }
