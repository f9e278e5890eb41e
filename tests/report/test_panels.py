"""Pictures hold the numbers they were given, and methods keep their looks."""

import math
from typing import Any

import numpy as np
import pytest

from dilocox_jax.report import panels, style
from dilocox_jax.report.curves import Curve, choose_front, draw_curves
from dilocox_jax.report.frame import Frame, Setting
from dilocox_jax.report.labels import PointLabel, place_labels
from dilocox_jax.report.line_panels import Panel
from dilocox_jax.report.line_panels import draw as draw_lines
from dilocox_jax.report.looks import looks, method_look
from tests.report.frames import ALLREDUCE, BOTH, CLOCK, frame, setting, trace

AXES = (CLOCK, panels.TOKENS, panels.BYTES)
LOSSES = {name: 1.0 + index / 10 for index, name in enumerate("abcdefgh")}


def lines(ax):
  return {line.get_gid(): line for line in ax.lines if line.get_gid()}


def test_a_curve_is_the_mean_over_seeds_against_each_cost():
  figure = panels.loss_panels(BOTH, AXES, "title")
  time, tokens, sent = figure.axes
  for ax, x in ((tokens, 1.0), (sent, 1000.0), (time, 100.0)):
    drawn = lines(ax)["diloco"]
    assert np.asarray(drawn.get_ydata())[-1] == pytest.approx(3.05)
    assert np.asarray(drawn.get_xdata())[-1] == pytest.approx(x)
  assert figure.get_suptitle() == "title"
  for ax in figure.axes:
    caption = ax.get_title(loc="left")
    assert "measured" in caption and "2\nseeds" in caption.replace(" s", "\ns")
  assert time.get_xscale() == sent.get_xscale() == "log"
  assert "tiny on 1gbit" in time.get_xlabel()


def test_a_setting_that_sends_nothing_is_left_out_of_the_bytes():
  some = frame(ALLREDUCE, setting("single", [2.0, 2.0], 0))
  figure = panels.loss_panels(some, [panels.TOKENS, panels.BYTES], "")
  assert "single" in lines(figure.axes[0])
  assert "single" not in lines(figure.axes[1])
  alone = panels.loss_panels(frame(some.settings[1]), [panels.BYTES], "")
  assert alone.axes[0].texts[0].get_text() == "nothing to show"


def many(**others):
  settings = [
    setting(f"diloco {n}", [2 + n / 50] * 2, 1000 + n) for n in range(9)
  ]
  far = setting("cocktail", [40.0, 40.0], 500)
  base = setting("allreduce", [2.1, 2.1], 8_000)
  return frame(base, *settings, far, **others)


def test_of_many_settings_the_ends_are_in_view_and_the_front_is_named():
  figure = panels.loss_panels(many(target=2.1), [panels.BYTES], "")
  (ax,) = figure.axes
  low, high = ax.get_ylim()
  assert low < 2 < 2.16 < high < 3
  assert "above the axis: cocktail" in ax.get_title(loc="left")
  assert {"target 2.1", "diloco 0"} <= {text.get_text() for text in ax.texts}
  colours = [line.get_color() for line in lines(ax).values()]
  assert colours.count(style.PALE) == 11 - 6


def test_what_reaches_the_target_first_is_no_baseline():
  fast = setting("fast", [2.0, 2.0], 10, seconds={CLOCK: 1.0})
  found = panels.first_to(frame(ALLREDUCE, fast, target=2.5), CLOCK)
  assert found and found.name == "fast"
  assert panels.first_to(frame(ALLREDUCE, fast), CLOCK) is None


def test_runs_without_curves_are_points():
  given = {"allreduce": (2.0, 900), "near": (2.1, 100), "worse": (2.2, 200)}
  ends = [Setting(name, [trace(0, *own)]) for name, own in given.items()]
  (ax,) = panels.loss_panels(Frame(ends), [panels.BYTES], "").axes
  names = {text.get_text(): text.get_fontweight() for text in ax.texts}
  assert names["near"] == names["allreduce"] == "bold"
  assert names.get("worse", "normal") == "normal"


@pytest.mark.parametrize(
  ("name", "like"),
  [
    ("DiLoCo", "diloco_cold"),
    ("DiLoCoX", "dilocox_reset_1gbit"),
    ("overlap_loco", "overlap_loco_adamw"),
    ("Streaming DiLoCo", "streaming_e3m0"),
    ("AllReduce", "allreduce_muon"),
  ],
)
def test_a_method_looks_alike_under_all_its_names(name, like):
  assert method_look(name) == method_look(like) is not None
  assert method_look("DiLoCo") != method_look("DiLoCoX")


def test_settings_of_a_method_differ_in_lines_and_others_in_colours():
  found = looks(["allreduce", "allreduce_muon", "30 Mbit/s", "1 Gbit/s"])
  assert found["allreduce"]["color"] == found["allreduce_muon"]["color"]
  assert len({each["linestyle"] for each in found.values()}) == 2
  assert found["30 Mbit/s"]["color"] != found["1 Gbit/s"]["color"]


@pytest.mark.parametrize(
  ("baseline", "priority", "front"),
  [
    ("h", [], ["h", *"abcde"]),
    ("gone", [], list("abcdef")),
    ("a", ["g", "gone", "h"], ["a", "g", "h", "b", "c", "d"]),
  ],
)
def test_baseline_named_and_lowest_curves_are_in_front(
  baseline, priority, front
):
  assert choose_front(LOSSES, baseline, priority) == front


def test_curves_in_front_are_thick_and_named_and_the_others_grey_behind():
  _, (ax,) = style.frame(1, "")
  drawn = [Curve(name, [1.0, 2.0], [y, y]) for name, y in LOSSES.items()]
  band = Curve("a", range(500), range(500), [0.5] * 500, [2.0] * 500)
  draw_curves(ax, [band, *drawn[1:], Curve("none", [], [])], ["a", "b"])
  found = lines(ax)
  assert found["a"].get_linewidth() > found["b"].get_linewidth()
  assert found["c"].get_color() == style.PALE
  assert found["c"].get_zorder() < found["b"].get_zorder()
  assert "none" not in found
  assert ax.get_legend_handles_labels()[1] == ["a", "b", "6 others"]
  edge = np.asarray(ax.collections[0].get_paths()[0].vertices)[:, 1]
  assert (edge.min(), edge.max()) == (0.5, 2.0)
  marked: Any = found["a"].get_markevery()
  assert 499 in marked and 10 < len(marked) <= 20


def test_names_do_not_overlap_unless_they_are_required():
  def placed(labels):
    figure, (ax,) = style.frame(1, "")
    ax.plot([0, 1], [0, 1])
    place_labels(figure, ax, labels)
    return ax.texts

  close = [PointLabel(f"name {n}", 0.5, 0.4 + n / 100) for n in range(12)]
  texts = placed(close)
  boxes = [text.get_window_extent() for text in texts]
  assert 0 < len(texts) < len(close)
  assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
  needed = [PointLabel(f"{n}", 0.5, 0.5, is_required=True) for n in range(30)]
  assert len(placed(needed)) == 30
  assert not placed([PointLabel("outside", 0.5, 9.0, is_required=True)])


@pytest.mark.parametrize(
  ("values", "is_log", "label", "ticks"),
  [
    ((64, 128), True, "rank (log scale)", ["64", "128"]),
    (tuple(range(1, 21)), False, "rank", None),
  ],
)
def test_lines_over_a_quantity_are_drawn_as_given(values, is_log, label, ticks):
  given = {name: [0.5] * len(values) for name in ("below", "above")}
  figure = draw_lines("t", [Panel("rank", "simulated", values, given, is_log)])
  (ax,) = figure.axes
  below, above = ax.get_lines()
  np.testing.assert_array_equal(below.get_ydata(), given["below"])
  assert below.get_linewidth() > above.get_linewidth() + 0.5
  assert ax.get_xlabel() == label
  if ticks:
    assert [text.get_text() for text in ax.get_xticklabels()] == ticks


def test_losses_far_above_the_rest_are_cut_but_for_those_that_are_kept():
  _, (ax,) = style.frame(1, "")
  losses = [2.0 + 0.01 * number for number in range(20)]
  assert style.cut_high(ax, losses) == style.cut_high(ax, [math.nan]) == ""
  assert style.cut_high(ax, [*losses, 60.0, math.nan], "cut") == "; cut"
  assert max(losses) < ax.get_ylim()[1] < 3
  assert style.cut_high(ax, [2.0, 2.01, 2.02, 2.5, 60.0], kept=[2.5])
  assert 2.5 < ax.get_ylim()[1] < 60


@pytest.mark.parametrize(
  ("sent_bytes", "scale"),
  [([10**6, 2 * 10**6], "linear"), ([10**6, 10**8], "log")],
)
def test_bytes_that_spread_over_decades_are_on_a_log_scale(sent_bytes, scale):
  _, (ax,) = style.frame(1, "")
  ax.plot(sent_bytes, [1, 2])
  style.bytes_axis(ax, sent_bytes)
  assert ax.get_xscale() == scale
  assert ax.xaxis.get_major_formatter()(10**6, 0) == "1 MB"


@pytest.mark.parametrize(("length", "columns"), [(10, 4), (24, 3), (90, 1)])
def test_legends_and_captions_stay_within_the_figure(length, columns):
  figure, (ax,) = style.frame(1, "", size=(8.4, 5.6))
  for letter in "abcde":
    ax.plot([1, 2], label=letter * length)
  style.caption(ax, "measured on a machine with a long name; " * 4)
  style.legend(figure, ax, 4)
  figure.draw_without_rendering()
  (legend,) = figure.legends
  box = legend.get_window_extent()
  assert vars(legend)["_ncols"] == columns
  assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
  assert max(map(len, ax.get_title(loc="left").splitlines())) < 140
