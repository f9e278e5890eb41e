"""Figures hold the numbers they were given, and methods keep their looks."""

import dataclasses
import math

import numpy as np
import pytest

from dilocox_jax.report import figures, load_run, panels, style
from tests.report.frames import ALLREDUCE, BOTH, CLOCK, frame, setting

AXES = (CLOCK, panels.TOKENS, panels.BYTES)
LOSSES = {name: 1.0 + index / 10 for index, name in enumerate("abcdefgh")}


def drawn(draw, run):
  """The axes of a figure, each of which says what kind of numbers it has."""
  figure = draw(run)
  assert figure is not None
  for ax in figure.axes:
    caption = ax.get_title(loc="left")
    assert any(word in caption for word in ("measured", "derived", "chosen"))
    assert ax.get_xlabel()
  return figure.axes


def curves(ax):
  """Horizontal and vertical values of each line, by its label or method."""
  return {
    line.get_gid() or line.get_label(): np.array(line.get_data())
    for line in ax.lines
  }


def test_the_loss_figure_shows_the_rows_against_tokens(run):
  (ax,) = drawn(figures.loss_figure, run)
  found = curves(ax)
  for name, field in (
    ("outer parameters", "outer_loss"),
    ("replicas' mean", "mean_loss"),
    ("replica 0", "replica_loss"),
  ):
    rows = [
      (each.tokens / 1e6, getattr(each, field)) for each in run.evaluations
    ]
    np.testing.assert_allclose(found[f"validation, {name}"].T, rows)
  trained = found["training, mean of replicas"][1]
  assert trained.tolist() == [row.loss for row in run.rounds]
  # The first loss of 500 flattens nothing.
  assert ax.get_ylim()[1] < 10 and "above the axis" in ax.get_title(loc="left")
  # 150 steps x 2 replicas x 1024 tokens, in millions.
  assert ax.patches[0].get_extents().x1 == pytest.approx(
    ax.transData.transform((0.3072, 0))[0]
  )
  no_mean = [
    dataclasses.replace(e, mean_loss=math.nan) for e in run.evaluations
  ]
  (ax,) = drawn(
    figures.loss_figure, dataclasses.replace(run, evaluations=no_mean)
  )
  assert "validation, replicas' mean" not in curves(ax)


@pytest.mark.parametrize(("count", "colours"), [(3, 3), (15, 2)])
def test_drift_has_a_line_a_fragment_and_a_mean_of_many(
  write_run, tmp_path, count, colours
):
  run = load_run(write_run(tmp_path, num_fragments=count, num_steps=90))
  axes = drawn(figures.drift_figure, run)
  for ax, field in zip(axes, ("cosine", "disagreement"), strict=True):
    assert len({each.get_color() for each in ax.lines}) == colours
    own = [d for r in run.rounds for d in r.drift if d.fragment == 2]
    rows = [(each.step, getattr(each, field)) for each in own]
    assert (
      np.array(ax.lines[2].get_data()).T.tolist() == np.array(rows).tolist()
    )
  if count == 15:
    first = np.mean([entry.cosine for entry in run.rounds[0].drift])
    mean = curves(axes[0])["mean of 15 fragments (grey)"]
    assert mean[1, 0] == pytest.approx(first)


def test_both_panels_of_bytes_show_the_flush(run):
  total, each = drawn(figures.bytes_figure, run)
  before, after = run.rounds[-1].total_sent_bytes, run.total_sent_bytes
  assert after - before == 3_484_672
  for ax, ends in (
    (total, [before / 1e6, after / 1e6]),
    (each, [0, (after - before) / 1e6]),
  ):
    np.testing.assert_allclose(curves(ax)["flush"], [[600, 600], ends])
  assert curves(total)["rounds"][1, -1] == pytest.approx(before / 1e6)


def test_time_is_that_of_the_clock(run):
  (ax,) = drawn(figures.time_figure, run)
  rows = [(each.step / 360, each.outer_loss) for each in run.evaluations]
  np.testing.assert_allclose(curves(ax)["diloco"].T, rows)
  assert "(h)" in ax.get_xlabel() and "1gbit" in ax.get_xlabel()


def test_ranks_and_rounds_are_drawn(run):
  left, right = drawn(figures.rank_figure, run)
  entries = [entry for row in run.rounds for entry in row.drift]
  for name, field in (
    ("sent", "rank"),
    ("measured, by energy", "energy_rank"),
    ("measured, stable rank", "stable_rank"),
  ):
    values = [getattr(entry, field) for entry in entries]
    assert curves(left)[name][1].tolist() == values
  (rounds,) = curves(right).values()
  assert rounds.T.tolist() == [[step, 30] for step in range(180, 601, 30)]


def test_a_curve_is_the_mean_over_seeds_against_each_cost():
  figure = panels.loss_panels(BOTH, AXES, "what it shows")
  for ax, x in zip(figure.axes, (100.0, 1.0, 1000.0), strict=True):
    assert curves(ax)["diloco"][:, -1] == pytest.approx([x, 3.05])
    assert "measured" in ax.get_title(loc="left")
    assert "seeds" in ax.get_title(loc="left")
    low, high = ax.collections[1].get_datalim(ax.transData).intervaly
    assert (low, high) == pytest.approx((2.06, 6.04))
  assert figure.get_suptitle() == "what it shows"
  time, tokens, sent = figure.axes
  assert time.get_xscale() == sent.get_xscale() == "log"
  assert "tiny on 1gbit" in time.get_xlabel()
  for ax in (time, sent):
    assert "log scale" in ax.get_xlabel()
  assert "log" not in tokens.get_xlabel()


def test_a_setting_that_sends_nothing_is_left_out_of_the_bytes():
  some = frame(ALLREDUCE, setting("single", [2.0, 2.0], 0))
  tokens, sent = panels.loss_panels(some, AXES[1:], "").axes
  assert "single" in curves(tokens) and "single" not in curves(sent)
  (ax,) = panels.loss_panels(frame(some.settings[1]), AXES[2:], "").axes
  assert ax.texts[0].get_text() == "nothing to show"


def test_of_many_settings_the_ends_are_in_view_and_the_front_is_named():
  settings = [
    setting(f"diloco {n}", [2 + n / 50] * 2, 1000 + n) for n in range(9)
  ]
  far = setting("cocktail", [40.0, 40.0], 500)
  base = setting("allreduce", [2.1, 2.1], 8_000)
  many = frame(base, *settings, far, target=2.1)
  (ax,) = panels.loss_panels(many, [panels.BYTES], "").axes
  low, high = ax.get_ylim()
  assert low < 2 < 2.16 < high < 3
  assert "above the axis: CocktailSGD" in ax.get_title(loc="left")
  names = {text.get_text() for text in ax.texts}
  assert {"target 2.1", "DiLoCo 0"} <= names
  colours = [line.get_color() for line in ax.lines if line.get_gid()]
  assert colours.count(style.PALE) == 11 - 6
  assert ax.get_legend_handles_labels()[1][-2:] == ["5 others", "Pareto front"]


def test_what_reaches_the_target_first_is_no_baseline():
  fast = setting("fast", [2.0, 2.0], 10, seconds={CLOCK: 1.0})
  found = panels.first_to(frame(ALLREDUCE, fast, target=2.5), CLOCK)
  assert found and found.name == "fast"
  assert panels.first_to(frame(ALLREDUCE, fast), CLOCK) is None


@pytest.mark.parametrize(
  ("name", "like", "proper"),
  [
    ("DiLoCo", "diloco_cold", "DiLoCo cold"),
    ("DiLoCoX", "dilocox_reset_1gbit", "DiLoCoX reset 1gbit"),
    ("overlap_loco", "overlap_loco_adamw", "overlap_loco adamw"),
    ("Streaming DiLoCo", "streaming_e3m0", "Streaming DiLoCo e3m0"),
    ("AllReduce", "allreduce_muon", "AllReduce muon"),
  ],
)
def test_a_method_looks_alike_under_all_its_names(name, like, proper):
  assert style.method_look(name) == style.method_look(like) is not None
  assert (style.proper(name), style.proper(like)) == (name, proper)
  assert style.method_look("DiLoCo") != style.method_look("DiLoCoX")
  assert style.looks(["AllReduce"])["AllReduce"]["color"] == "black"


def test_settings_of_a_method_differ_in_lines_and_others_in_colours():
  found = style.looks(["allreduce", "allreduce_muon", "30 Mbit/s", "1 Gbit/s"])
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
  assert panels.choose_front(LOSSES, baseline, priority) == front


def test_curves_in_front_are_thick_and_long_ones_have_few_markers():
  _, (ax,) = style.frame(1, "")
  points = range(500)
  drawn = [panels.Curve(name, points, points) for name in "abc"]
  panels.draw_curves(ax, [*drawn, panels.Curve("none", [], [])], ["a", "b"])
  a, b, c = (line for line in ax.lines if line.get_gid())
  assert a.get_linewidth() > b.get_linewidth() > c.get_linewidth()
  assert c.get_color() == style.PALE and c.get_zorder() < b.get_zorder()
  assert ax.get_legend_handles_labels()[1] == ["a", "b", "1 others"]
  marked = list(a.get_markevery())  # pyright: ignore[reportArgumentType]
  assert 499 in marked and 10 < len(marked) <= 20


def test_names_of_points_do_not_overlap():
  figure, (ax,) = style.frame(1, "")
  ax.plot([0, 1], [0, 1])
  close = [(f"name {n}", 0.5, 0.4 + n / 50) for n in range(6)]
  panels.name_points(figure, ax, [*close, ("outside", 0.5, 9.0)])
  boxes = [text.get_window_extent() for text in ax.texts]
  assert 0 < len(boxes) < len(close)
  assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_losses_far_above_the_rest_are_cut_but_for_those_that_are_kept():
  _, (ax,) = style.frame(1, "")
  losses = [2.0 + 0.01 * number for number in range(20)]
  assert style.cut_high(ax, losses, []) == style.cut_high(ax, [math.nan], [])
  assert style.cut_high(ax, [*losses, 60.0, math.nan], [])
  assert max(losses) < ax.get_ylim()[1] < 3
  assert style.cut_high(ax, [2.0, 2.01, 2.02, 2.5, 60.0], [2.5])
  assert 2.5 < ax.get_ylim()[1] < 60


@pytest.mark.parametrize(
  ("most", "scale", "name"),
  [(2e6, "linear", "sent (MB)"), (1e8, "log", "sent (MB, log scale)")],
)
def test_costs_that_spread_over_decades_are_on_a_log_scale(most, scale, name):
  _, (ax,) = style.frame(1, "")
  style.cost_axis(ax, [1e6, most], "sent (MB)", lambda value: f"<{value:g}>")
  assert (ax.get_xscale(), ax.get_xlabel()) == (scale, name)
  assert ax.xaxis.get_major_formatter()(10**6, 0) == "<1e+06>"


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
