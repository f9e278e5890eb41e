import math

import pytest

from dilocox_jax.report import style


@pytest.mark.parametrize("panels", [1, 2])
def test_a_frame_has_its_panels_and_its_title(panels):
  figure, axes = style.frame(panels, "what is seen")
  assert len(axes) == panels == len(figure.axes)
  assert figure.get_suptitle() == "what is seen"


def test_a_size_can_be_chosen():
  figure, _ = style.frame(1, "", size=(8.0, 5.0))
  assert tuple(figure.get_size_inches()) == (8.0, 5.0)


def test_losses_far_above_the_rest_are_cut_and_it_is_said():
  _, (ax,) = style.frame(1, "")
  losses = [2.0 + 0.01 * number for number in range(20)]
  ax.plot(losses)
  assert style.cut_high(ax, losses) == ""
  said = style.cut_high(ax, [*losses, 60.0, math.nan], "some are cut")
  assert said == "; some are cut"
  low, high = ax.get_ylim()
  assert low < min(losses) and max(losses) < high < 3


def test_a_loss_that_is_kept_stays_in_view_although_others_are_cut():
  _, (ax,) = style.frame(1, "")
  losses = [2.0, 2.01, 2.02, 2.5, 60.0]
  assert style.cut_high(ax, losses, kept=[2.5, math.nan])
  assert 2.5 < ax.get_ylim()[1] < 60


def test_losses_that_are_not_finite_cut_nothing():
  _, (ax,) = style.frame(1, "")
  assert style.cut_high(ax, [math.nan]) == ""


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


def test_an_axis_without_bytes_says_so():
  _, (ax,) = style.frame(1, "")
  style.bytes_axis(ax, [])
  assert ax.texts[0].get_text() == "nothing to show"


def test_the_legend_names_every_line():
  figure, (ax,) = style.frame(1, "")
  for name in ("one", "two"):
    ax.plot([1, 2], label=name)
  style.legend(figure, ax, 4)
  (legend,) = figure.legends
  assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]


@pytest.mark.parametrize(
  ("length", "columns"), [(10, 4), (24, 3), (40, 2), (90, 1)]
)
def test_a_legend_of_long_names_stays_within_the_figure(length, columns):
  figure, (ax,) = style.frame(1, "", size=(8.4, 5.6))
  for letter in "abcde":
    ax.plot([1, 2], label=letter * length)
  style.legend(figure, ax, 4)
  figure.draw_without_rendering()
  (legend,) = figure.legends
  box = legend.get_window_extent()
  assert vars(legend)["_ncols"] == columns
  assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("panels, most", [(1, 65), (3, 60)])
def test_a_long_line_above_a_panel_is_wrapped(panels, most):
  _, axes = style.frame(panels, "title", (4.8 * panels, 4.4))
  style.caption(axes[0], "measured on a machine with a long name; " * 4)
  lines = axes[0].get_title(loc="left").splitlines()
  assert len(lines) > 1 and max(map(len, lines)) < most
