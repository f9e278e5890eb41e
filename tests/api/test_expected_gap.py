"""Expected gaps: measured points, what lies between, and what is unknown."""

from typing import Any

import pytest

from dilocox_jax.api.expected_gap import expected_gap, tuned_outer
from dilocox_jax.config import from_mapping


def gap(
  method,
  interval=None,
  steps=2000,
  inner=None,
  outer=None,
  sync=None,
  **codec,
) -> Any:
  """The gap of a run, by default with the outer step of the measurement."""
  sync = {"method": method} | (sync or {})
  if outer is None:
    tuned = tuned_outer(method, codec.get("name", ""), interval or 1)
    outer = {path.split(".")[1]: value for path, value in tuned.items()}
  if interval:
    sync["sync_interval"] = interval
  if method == "overlap_loco" and interval:
    sync["num_fragments"] = min(interval, 16)
  config = from_mapping(
    {
      "total_steps": steps,
      "sync": sync,
      "codec": codec,
      "outer": outer,
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


@pytest.mark.parametrize(
  "found, words",
  [
    (
      gap("open_diloco", 4, outer={"momentum": 0.9}),
      "at H = 4, with outer momentum 0 instead of 0.9",
    ),
    (
      gap("open_diloco", 16, outer={"learning_rate": 0.4, "momentum": 0.6}),
      "with outer rate 0.7 instead of 0.4",
    ),
    (
      gap("streaming_diloco", 25, sync={"overlap_steps": 16}, name="e3m0"),
      "with tau 4 instead of 16",
    ),
    (
      gap("dilocox", 4, name="low_rank+int", bits=4, rank=1),
      "with width over rank 8 instead of 128",
    ),
    (
      gap("diloco", 25, outer={"average_power": 8}),
      "measured at H = 25, but not with an average",
    ),
  ],
)
def test_other_settings_than_the_measured_ones_are_said(found, words):
  assert found.is_extrapolated and words in found.basis


@pytest.mark.parametrize(
  "found, percent",
  [
    (
      gap(
        "diloco",
        25,
        sync={"warm_start": "data_parallel", "warm_start_steps": 300},
      ),
      0.78,
    ),
    (
      gap(
        "dilocox",
        4,
        outer={"learning_rate": 0.4, "momentum": 0.0},
        sync={"rule": "reset"},
      ),
      7.32,
    ),
    (
      gap(
        "overlap_loco",
        16,
        outer={"learning_rate": 0.7, "momentum": 0.3, "average_power": 14},
      ),
      0.37,
    ),
  ],
)
def test_a_variant_that_was_measured_has_its_own_gap(found, percent):
  assert found.percent == percent and not found.is_extrapolated


@pytest.mark.parametrize(
  "method, codec, interval, rate, momentum",
  [
    ("open_diloco", "", 9, 0.7, 0.6),  # 9 / 4 is more than 20 / 9.
    ("open_diloco", "", 8, 0.7, 0.0),
    ("streaming_diloco", "e3m0", 30, 0.7, 0.6),
    ("streaming_diloco", "float32", 30, 0.7, 0.9),
  ],
)
def test_the_outer_step_is_that_of_the_nearest_measurement(
  method, codec, interval, rate, momentum
):
  found = tuned_outer(method, codec, interval)
  assert found == {"outer.learning_rate": rate, "outer.momentum": momentum}
  assert tuned_outer("allreduce", "", 1) == {}
