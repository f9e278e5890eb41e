"""Expected gaps: measured points, what lies between, and what is unknown."""

from typing import Any

import pytest

from dilocox_jax.api.expected_gap import expected_gap
from dilocox_jax.config import from_mapping


def gap(method, interval=None, steps=2000, inner=None, **codec) -> Any:
  sync = {"method": method}
  if interval:
    sync["sync_interval"] = interval
  if method == "overlap_loco" and interval:
    sync["num_fragments"] = min(interval, 16)
  config = from_mapping(
    {
      "total_steps": steps,
      "sync": sync,
      "codec": codec,
      "inner": {"optimizer": inner},
    }
  )
  return expected_gap(config)


def test_a_measured_setting_has_the_measured_gap():
  found = gap("open_diloco", 20)
  assert found.percent == 3.44 and not found.is_extrapolated
  assert found.basis == "measured at H = 20 (docs/results.md)"


def test_between_two_measurements_it_is_linear_in_the_logarithm():
  # 10 is the geometric mean of 4 and 25; at 20 the line has 3.44.
  middle = gap("open_diloco", 9).percent
  assert 1.19 < middle < 3.44
  assert gap("dilocox", 9).percent == pytest.approx(
    4.31 + (17.20 - 4.31) * 0.5, abs=0.15
  )  # 9 = sqrt(4 x 20) nearly.
  assert "interpolated between H = 4 and 500" in gap("open_diloco", 9).basis


def test_one_measurement_grows_as_open_diloco_does():
  ratio = gap("open_diloco", 500).percent / gap("open_diloco", 16).percent
  assert gap("overlap_loco", 500).percent == pytest.approx(1.01 * ratio)
  assert gap("overlap_loco", 500).is_extrapolated


def test_no_gap_is_negative():
  assert gap("dilocox", 1).percent >= 0


@pytest.mark.parametrize(
  "found, words",
  [
    (gap("overlap_loco", 16, bits=2, name="int"), "with 1 bits instead of 2"),
    (gap("overlap_loco", 16, steps=4000), "measured at H = 16"),
  ],
)
def test_what_differs_from_the_sweep_is_an_extrapolation(found, words):
  assert found.is_extrapolated and words in found.basis


def test_what_was_never_measured_is_unknown():
  assert gap("diloco", 25, inner="sgd") is None
  assert gap("overlap_loco", 16, name="e3m0") is None
