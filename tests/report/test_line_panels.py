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


def test_no_two_of_twelve_lines_look_alike():
  lines = {f"line {number}": [0.1, 0.2] for number in range(12)}
  (ax,) = draw("Many", [Panel("rank", "simulated", (1, 2), lines)]).axes
  looks = {(one.get_color(), one.get_linestyle()) for one in ax.get_lines()}
  assert len(looks) == 12


def test_many_values_keep_the_ticks_of_their_scale():
  values = list(range(1, 21))
  panel = Panel("clusters", "simulated", values, {"a": [0.5] * 20}, False)
  (ax,) = draw("Clusters", [panel]).axes
  assert ax.get_xscale() == "linear" and ax.get_xlabel() == "clusters"
  assert len(ax.get_xticks()) < 20


def test_a_line_that_is_too_short_is_named():
  with pytest.raises(ValueError, match="line 'slow' has 1 shares for 2 values"):
    Panel("rank", "simulated", (64, 128), {"slow": [0.5]})
