import itertools
import math

import numpy as np
import pytest

from dilocox_jax.report.ablation import figures
from dilocox_jax.report.ablation.trials import SettingResult
from dilocox_jax.report.spread import Spread


def entry(name, sent_bytes, losses=(2.0,), **settings):
  return SettingResult(
    name,
    "corpus",
    {},
    settings,
    tuple(range(len(losses))),
    Spread(tuple(losses)),
    len(losses),
    sent_bytes,
    1.0,
    (),
  )


def labels(figure):
  return {text.get_text(): text for text in figure.axes[0].texts}


def test_the_front_is_marked_and_named():
  found = [
    entry("cheap", 10**6, [3.0]),
    entry("beaten", 10**7, [3.2]),
    entry("best", 10**8, [2.0]),
  ]
  figure = figures.pareto(found)
  (ax,) = figure.axes
  drawn = [np.asarray(line.get_xydata()).tolist() for line in ax.lines]
  front = [[1e6, 3.0], [1e8, 2.0]]
  assert drawn.count(front) == 2  # Points, and the steps between them.
  assert [[1e7, 3.2]] in drawn
  named = labels(figure)
  assert set(named) == {"cheap", "beaten", "best"}
  assert named["best"].get_fontweight() == "bold"
  assert named["beaten"].get_fontweight() == "normal"
  assert ax.get_xscale() == "log"
  assert "best, 2.0000" in figure.get_suptitle()


def test_names_cover_neither_each_other_nor_points():
  found = [
    entry(f"setting number {number}", 10**7, [2 + number / 1600])
    for number in range(20)
  ] + [entry("far", 10**5, [2.012])]
  figure = figures.pareto(found)
  figure.draw_without_rendering()
  texts = figure.axes[0].texts
  boxes = [text.get_window_extent() for text in texts]
  assert {"setting number 0", "far"} <= set(labels(figure))
  assert 2 < len(texts) < len(found)
  assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_several_seeds_have_bars_and_one_has_none():
  several = figures.pareto([entry("a", 10**6, [2.0, 2.1, 2.3])])
  (bar,) = several.axes[0].collections
  ((_, low), (_, high)) = np.asarray(bar.get_segments()[0])  # pyright: ignore
  error = np.std([2.0, 2.1, 2.3], ddof=1) / math.sqrt(3)
  assert (high - low) / 2 == pytest.approx(error)
  assert "standard error" in several.axes[0].get_title(loc="left")
  one = figures.pareto([entry("a", 10**6)])
  assert not one.axes[0].collections


def test_a_run_that_sends_nothing_has_no_place_on_the_log_axis():
  figure = figures.pareto([entry("mute", 0), entry("a", 10**6)])
  assert set(labels(figure)) == {"a"}


def test_only_fields_with_a_line_are_charted():
  found = [
    entry("a", 1, rank=8, bits=4, decay=1.0),
    entry("b", 1, rank=16, bits=4, decay=1.0),
    entry("c", 1, rank=None, bits=2, decay=1.0),
    entry("d", 1, rank=32, bits=8, decay=0.9),
  ]
  assert figures.charted(found) == ["rank"]
  assert figures.charted([]) == []


def test_a_chart_has_a_line_for_each_group_of_equal_settings():
  found = [
    entry(f"{rank} {decay}", 1, [rank + decay], rank=rank, decay=decay)
    for decay in (1.0, 0.9)
    for rank in (32, 8, 16)
  ]
  figure = figures.hyper_parameter(found, "rank")
  (ax,) = figure.axes
  assert len(ax.lines) == 2
  for line, decay in zip(ax.lines, (1.0, 0.9), strict=True):
    expected = [[r, r + decay] for r in (8, 16, 32)]
    assert np.asarray(line.get_xydata()).tolist() == expected
  (legend,) = figure.legends
  named = [text.get_text() for text in legend.get_texts()]
  assert named == ["decay=1.0", "decay=0.9"]
  assert ax.get_xlabel() == "rank" and ax.get_xscale() == "log"
  assert [t.get_text() for t in ax.get_xticklabels()] == ["8", "16", "32"]


def test_words_stand_side_by_side_in_the_order_given():
  found = [entry(rule, 1, rule=rule) for rule in ("mix", "reset", "eager")]
  figure = figures.hyper_parameter(found, "rule")
  ticks = figure.axes[0].get_xticklabels()
  assert [tick.get_text() for tick in ticks] == ["mix", "reset", "eager"]
  assert not figure.legends


def test_many_lines_give_way_to_their_mean():
  found = [
    entry("", 1, [2 + other / 10 + rank], rank=rank, other=other)
    for other in range(9)
    for rank in (0.1, 0.2)
  ]
  figure = figures.hyper_parameter(found, "rank")
  *pale, mean = figure.axes[0].lines
  assert len(pale) == 9
  assert mean.get_label() == "mean of 9 lines"
  title = figure.get_suptitle().replace("\n", " ")
  assert title == "rank = 0.1 ends lowest: 2.5000 in the mean of 9 lines"
  np.testing.assert_allclose(np.asarray(mean.get_ydata()), [2.5, 2.6])


def test_a_setting_that_diverged_does_not_flatten_the_rest():
  losses = [2.0, 2.02, 2.05, 2.01, 2.04, 40.0]
  found = [entry(str(x), 10**6, [x]) for x in losses]
  figure = figures.pareto(found)
  assert figure.axes[0].get_ylim()[1] < 3
  assert "above the axis" in figure.axes[0].get_title(loc="left")
  assert "40.0" not in labels(figure)


def test_the_front_is_never_cut():
  losses = [2.0, 2.02, 2.05, 2.01, 2.04]
  found = [entry(str(x), 10**6, [x]) for x in losses]
  figure = figures.pareto([*found, entry("cheap", 10**4, [9.0])])
  assert figure.axes[0].get_ylim()[1] > 9
  assert "above the axis" not in figure.axes[0].get_title(loc="left")
  assert "cheap" in labels(figure)


def test_many_lines_without_a_common_value_have_no_mean():
  found = [
    entry(f"{line} {rate}", 10**6, [2.0 + rate], h=line, rate=line + rate)
    for line in range(8)
    for rate in (0.1, 0.2)
  ]
  figure = figures.hyper_parameter(found, "rate")
  assert len(figure.axes[0].lines) >= 8 and not figure.legends
