from typing import Any

import numpy as np

from dilocox_jax.report import style
from dilocox_jax.report.curves import Curve, choose_front, draw_curves

LOSSES = {name: 1.0 + index / 10 for index, name in enumerate("abcdefgh")}


def test_the_baseline_and_the_lowest_are_in_front():
  assert choose_front(LOSSES, "h") == ["h", *"abcde"]
  assert choose_front({"a": 1.0}, "gone") == ["a"]


def test_named_curves_come_before_the_lowest():
  front = choose_front(LOSSES, "a", ["g", "gone", "h"])
  assert front == ["a", "g", "h", "b", "c", "d"]


def _draw(front):
  _, (ax,) = style.frame(1, "")
  curves = [Curve(name, [1.0, 2.0], [y, y]) for name, y in LOSSES.items()]
  draw_curves(ax, [*curves, Curve("empty", [], [])], front, "a")
  return {line.get_gid(): line for line in ax.lines}, ax


def test_curves_in_front_have_colours_and_the_others_are_grey_behind_them():
  lines, ax = _draw(["a", "b"])
  assert lines["a"].get_color() == "black"
  assert lines["b"].get_color() == style.COLOURS[0]
  for name in "cdefgh":
    assert lines[name].get_color() == style.PALE
    assert lines[name].get_zorder() < lines["b"].get_zorder()
  _, labels = ax.get_legend_handles_labels()
  assert labels == ["a", "b", "6 other methods"]


def test_a_curve_keeps_its_colour_in_figures_with_other_fronts():
  places = {"b": 3, "c": 3, "d": 1}
  for front in (["a", "b", "c", "d", "e"], ["a", "e", "d", "b"]):
    _, (ax,) = style.frame(1, "")
    curves = [Curve(name, [1.0], [1.0]) for name in front]
    draw_curves(ax, curves, front, "a", places=places)
    colours = {str(x.get_gid()): x.get_color() for x in ax.lines}
    assert colours["b"] == style.COLOURS[3]
    assert colours["d"] == style.COLOURS[1]
    # Whose colour is taken has the next one; nobody shares one.
    assert colours.get("c", style.COLOURS[4]) == style.COLOURS[4]
    assert len(set(colours.values())) == len(front)


def test_a_curve_without_points_is_neither_drawn_nor_named():
  lines, _ = _draw(["a", "empty"])
  assert "empty" not in lines


def test_a_curve_below_others_is_thicker():
  lines, _ = _draw(["a", "b", "c"])
  widths = [lines[name].get_linewidth() for name in "abc"]
  assert widths == sorted(widths, reverse=True) and len(set(widths)) == 3


def test_a_band_reaches_from_low_to_high():
  _, (ax,) = style.frame(1, "")
  curve = Curve("a", [1.0, 2.0], [1.0, 1.0], [0.5, 0.5], [2.0, 2.0])
  draw_curves(ax, [curve], ["a"], "a")
  vertices = np.asarray(ax.collections[0].get_paths()[0].vertices)
  assert (vertices[:, 1].min(), vertices[:, 1].max()) == (0.5, 2.0)


def test_markers_of_a_long_curve_stay_apart_and_its_end_has_one():
  _, (ax,) = style.frame(1, "title")
  steps = list(range(500))
  draw_curves(ax, [Curve("long", steps, steps)], ["long"], baseline="")
  marked: Any = ax.get_lines()[0].get_markevery()
  assert 499 in marked and 10 < len(marked) <= 20
