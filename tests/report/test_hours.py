import dataclasses
import math

import numpy as np
import pytest

from dilocox_jax.metrics import Timing
from dilocox_jax.report import load_run
from dilocox_jax.report.figures import time_figure


def with_clock(run, seconds_a_step):
  timings = [
    Timing(e.step, "evaluation", 1.0, math.nan, e.step * seconds_a_step)
    for e in run.evaluations
  ]
  return dataclasses.replace(run, timings=run.timings + timings)


@pytest.mark.parametrize(
  "seconds_a_step, divisor, unit", [(0.001, 1, "s"), (500.0, 3600, "h")]
)
def test_the_figure_shows_loss_against_the_time_of_the_clock(
  seconds_a_step, divisor, unit, write_run, tmp_path
):
  run = load_run(write_run(tmp_path))
  figure = time_figure(with_clock(run, seconds_a_step))
  assert figure
  (ax,) = figure.axes
  (line,) = ax.get_lines()
  at = [e.step * seconds_a_step / divisor for e in run.evaluations]
  np.testing.assert_allclose(np.asarray(line.get_xdata()), at)
  np.testing.assert_allclose(
    np.asarray(line.get_ydata()), [e.outer_loss for e in run.evaluations]
  )
  assert ax.get_xlabel().endswith(f"({unit})")
  assert f"{run.validation_loss:.4f}" in figure.get_suptitle()


def test_a_run_without_a_clock_has_no_such_figure(write_run, tmp_path):
  assert time_figure(load_run(write_run(tmp_path))) is None
