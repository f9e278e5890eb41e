"""The gap to AllReduce that this repository's own sweeps lead one to expect.

The figures were measured with 0.86 million parameters, 2000 inner steps and two
replicas (`data/measured_gaps.csv`). For any other run they are an
extrapolation, and every answer says how far it is from what was measured.
"""

import csv
import dataclasses
import functools
import importlib.resources
from collections.abc import Mapping

import numpy as np

from dilocox_jax.config import RunConfig
from dilocox_jax.plan.model.shapes import parameter_count

MEASURED_WITH = "0.86 M parameters, 2000 steps, 2 replicas"
_MEASURED_PARAMETERS, _MEASURED_STEPS = 857_216, 2000
# Measured at three values of H, so it says how a gap grows with H.
_REFERENCE = ("open_diloco", "adamw", "float16")
_Setting = tuple[str, str, str]


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
  key, remark = found
  curve, source = _curves()[key], _sources()[key]
  interval = config.sync.named.schedule.sync_interval
  lowest, highest = min(curve), max(curve)
  if interval in curve:
    how = f"measured at H = {interval}"
  elif lowest < interval < highest:
    how = f"interpolated between H = {lowest} and {highest}"
  else:
    how = f"extrapolated from H = {min(curve, key=lambda h: abs(h - interval))}"
  outside = not lowest <= interval <= highest
  return ExpectedGap(
    _gap(curve, interval),
    f"{how}{remark} ({source})",
    outside or bool(remark) or not _is_like_the_sweep(config),
  )


def _is_like_the_sweep(config: RunConfig) -> bool:
  same_size = parameter_count(config.model.shape) == _MEASURED_PARAMETERS
  return (
    same_size
    and config.total_steps == _MEASURED_STEPS
    and config.mesh.num_replicas == 2
  )


def _nearest(config: RunConfig) -> tuple[_Setting, str] | None:
  """Returns the measured setting of a run, and in what the run differs."""
  method, inner = config.sync.method, config.inner.optimizer
  name, bits = config.codec.name, config.codec.bits
  own = f"{name} {bits} bits" if bits else name
  if (method, inner, own) in _curves():
    return (method, inner, own), ""
  for fewer in range(bits - 1 if bits else 0, 0, -1):
    key = method, inner, f"{name} {fewer} bits"
    if key in _curves():
      return key, f", with {fewer} bits instead of {bits}"
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


def _key(row: Mapping[str, str]) -> _Setting:
  return row["method"], row["inner_optimizer"], row["codec"]


@functools.cache
def _curves() -> dict[_Setting, dict[int, float]]:
  """Gaps (per cent) by H, by setting."""
  curves: dict[_Setting, dict[int, float]] = {}
  for row in _rows():
    gaps = curves.setdefault(_key(row), {})
    gaps[int(row["sync_interval"])] = float(row["gap_percent"])
  return curves


@functools.cache
def _sources() -> dict[_Setting, str]:
  return {_key(row): row["source"] for row in _rows()}
