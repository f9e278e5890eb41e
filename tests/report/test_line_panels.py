"""Figures of sweeps hold what they were given."""

import numpy as np
import pytest

from dilocox_jax.report.line_panels import Panel, draw

PANEL = Panel("rank", "simulated", (64, 128), {"slow": [0.5, 0.25]})


def test_lines_are_drawn_as_given_with_a_tick_for_each_of_few_values():
  figure = draw("Utilisation", [PANEL])
  (ax,) = figure.axes
  (drawn,) = ax.get_lines()
  np.testing.assert_array_equal(drawn.get_ydata(), [0.5, 0.25])
  assert [text.get_text() for text in ax.get_xticklabels()] == ["64", "128"]
  assert ax.get_xscale() == "log" and ax.get_xlabel() == "rank (log scale)"


def test_six_of_twelve_lines_are_in_front_the_first_one_and_named_ones_first():
  lines = {f"line {number}": [0.1, number / 20] for number in range(12)}
  panel = Panel("rank", "simulated", (1, 2), lines)
  (ax,) = draw("Many", [panel], front=["line 3"]).axes
  assert ax.get_legend_handles_labels()[1] == [
    *("line 0", "line 3", "line 11", "line 10", "line 9", "line 8"),
    "6 other methods",
  ]
  colours = {line.get_color() for line in ax.get_lines()}
  assert len(colours) == 7


def test_lines_that_coincide_all_show():
  lines = {name: [1.0, 1.0] for name in ("below", "above")}
  (ax,) = draw("Full", [Panel("rank", "simulated", (1, 2), lines)]).axes
  below, above = ax.get_lines()
  assert below.get_linewidth() > above.get_linewidth() + 0.5
  assert below.get_markersize() > above.get_markersize() + 0.5


def test_many_values_keep_the_ticks_of_their_scale():
  values = list(range(1, 21))
  panel = Panel("clusters", "simulated", values, {"a": [0.5] * 20}, False)
  (ax,) = draw("Clusters", [panel]).axes
  assert ax.get_xscale() == "linear" and ax.get_xlabel() == "clusters"
  assert len(ax.get_xticks()) < 20


def test_a_line_that_is_too_short_is_refused():
  panel = Panel("rank", "simulated", (64, 128), {"slow": [0.5]})
  with pytest.raises(ValueError, match="must have same first dimension"):
    draw("Short", [panel])
