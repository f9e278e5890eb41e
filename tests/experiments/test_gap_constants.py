"""The constants of the law follow from the committed runs."""

import dataclasses
import json
import math
import pathlib

import pytest

from dilocox_jax.gap.law import PATH, law_of
from experiments.gaps import constants, rows
from tests.experiments.test_gap_law import (
  CENTER,
  allreduce_rows,
  divided,
  finished,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_the_file_is_that_of_the_committed_runs():
  finished_runs = rows.read(ROOT / "docs/results/gap_law.csv")
  found = constants.content(finished_runs, "judge_average")
  assert found == json.loads(PATH.read_text()), (
    "run python -m experiments.fit_gaps --write --workdir=runs/gap_law"
  )


def loss(batch):
  return 2 * batch**-0.1


def runs_on_a_line(slope, offset, growth):
  """Runs whose doublings lost are a line at H = 16, times a power of H."""
  found = allreduce_rows({batch: loss(batch) for batch in (1, 2, 4, 8, 16)})
  for replicas in (2, 4, 8):
    for interval in (8, 16, 32):
      lost = slope * math.log2(replicas) - offset
      lost *= (interval / 16) ** growth
      setting = dataclasses.replace(divided(replicas), interval=interval)
      found += finished(setting, loss(16 / 2**lost))
  return [dataclasses.replace(row, parameters=26_000) for row in found]


def test_line_and_power_are_fitted_to_runs():
  found = constants.content(runs_on_a_line(0.6, 0.1, 0.5), "judge_average")
  assert [line["doublings"] for line in found["lines"][:2]] == ["last", "curve"]
  for line in found["lines"][:2]:
    # Each doubling gains the same here, so both lines are one.
    assert line["slope"] == pytest.approx(0.6, abs=1e-3)
    assert line["offset"] == pytest.approx(0.1, abs=1e-3)
    assert (line["parameters"], line["steps"]) == (26_000, CENTER.steps)
    assert line["kind"] == "fitted"
  # The lines of the earlier study stay, and their range of powers too.
  assert found["lines"][2:] == constants.ELSEWHERE["lines"]
  power = found["interval_power"]
  assert power["value"] == pytest.approx(0.5, abs=1e-3)
  assert (power["low"], power["high"]) == (0.2, 0.6)
  assert power["tried"] == [8, 32]
  assert law_of(found).interval_power.value == power["value"]
  steep = constants.content(runs_on_a_line(0.6, 0.1, 0.8), "judge_average")
  assert steep["interval_power"]["high"] == pytest.approx(0.8, abs=1e-3)


def test_other_settings_are_no_line_of_plain_diloco():
  delayed = [
    dataclasses.replace(row, delay=0 if row.interval == 0 else 2, bits=1)
    for row in runs_on_a_line(0.6, 0.1, 0.5)
  ]
  found = constants.content(delayed, "judge_average")
  assert found["lines"] == constants.ELSEWHERE["lines"]
  assert found["interval_power"] == constants.ELSEWHERE["interval_power"]


def test_factors_compare_measured_gaps_at_one_h():
  factors = constants.content([], "judge_average")["factors"]
  assert factors["diloco"]["value"] == 1
  # 7.98 % with H = 25 and 19.12 % with H = 20, at four replicas.
  ratio = math.log(1.191238) / math.log(1.079828)
  expected = (
    ratio * (20 / 25) ** -constants.ELSEWHERE["interval_power"]["value"]
  )
  assert factors["dilocox"]["value"] == pytest.approx(expected, abs=1e-3)
  assert "cocktail_sgd" not in factors and "delayed" not in factors
