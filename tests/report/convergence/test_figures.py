import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation

from dilocox_jax.report.convergence import figures as figures
from experiments.configs import convergence_small
from tests.report import convergences

DRAW = {
  "tokens": figures.loss_by_tokens,
  "bytes": figures.loss_by_bytes,
  "hours": lambda found: figures.loss_by_time(found, "large"),
}


def lines(figure):
  (ax,) = figure.axes
  return {
    line.get_label(): np.asarray(line.get_xydata())
    for line in ax.lines
    if not line.get_label().startswith("_")
  }


@pytest.mark.parametrize(
  "name, last", [("tokens", 4.0), ("bytes", 1e7), ("hours", 1.0)]
)
def test_a_line_is_the_mean_of_the_seeds(name, last):
  found = lines(DRAW[name](convergences.comparison()))
  assert list(found) == [
    *("allreduce", "diloco", "dilocox", "eager (1 of 2)", "wild (1 of 2)")
  ]
  assert found["diloco"].shape == (4, 2)
  assert found["diloco"][-1] == pytest.approx((last, 1.06))


def test_a_band_reaches_from_the_lowest_seed_to_the_highest():
  (ax,) = figures.loss_by_tokens(convergences.comparison()).axes
  vertices = np.asarray(ax.collections[1].get_paths()[0].vertices)
  at_end = vertices[vertices[:, 0] == 4.0][:, 1]
  assert (min(at_end), max(at_end)) == pytest.approx((1.05, 1.07))


def test_no_two_methods_of_the_comparison_look_alike():
  methods = convergence_small.get_config().to_dict()["methods"]
  entries = [convergences.entry(each["name"], 1.0) for each in methods]
  (ax,) = figures.loss_by_tokens(convergences.comparison(entries=entries)).axes
  shown = [x for x in ax.lines if not str(x.get_label()).startswith("_")]
  looks = {(x.get_color(), x.get_linestyle()) for x in shown}
  assert len(looks) == len(shown) == len(methods)


def test_the_clock_of_a_figure_is_named_on_it():
  (ax,) = figures.loss_by_time(convergences.comparison(), "large").axes
  assert convergences.CLOCKS["large"] in ax.get_xlabel()


def test_a_long_name_of_a_clock_is_not_cut_off():
  clocks = {"large": "what is timed, and what is left out of it; " * 4}
  figure = figures.loss_by_time(convergences.comparison(clocks=clocks), "large")
  canvas = FigureCanvasAgg(figure)
  canvas.draw()
  label = figure.axes[0].xaxis.label.get_window_extent(canvas.get_renderer())
  assert 0 < label.x0 and label.x1 < figure.bbox.width


def test_curves_are_shown_where_they_end():
  (ax,) = figures.loss_by_time(convergences.comparison(), "near").axes
  low, high = ax.get_ylim()
  assert low < 1.0 and 1.2 < high < 1.2 + 4 * (1 / 10 - 1 / 40)


def test_one_that_ends_far_above_does_not_squeeze_the_others():
  entries = [*convergences.comparison().entries]
  entries.append(convergences.entry("lost", 2.4, 2.5))
  (ax,) = figures.loss_by_tokens(convergences.comparison(entries=entries)).axes
  _, high = ax.get_ylim()
  assert 1.2 < high < 1.5
  assert ax.get_title(loc="left").endswith("above the axis: lost")


def test_a_clock_shows_no_method_whose_rounds_were_made_for_another():
  entries = [*convergences.comparison().entries]
  entries.insert(1, convergences.entry("there", 1.1, 1.1, clock="near"))
  found = convergences.comparison(entries=entries)
  near, large = (
    figures.loss_by_time(found, clock) for clock in ("near", "large")
  )
  assert lines(near).keys() - lines(large).keys() == {"there"}
  colours = [
    {x.get_label(): x.get_color() for x in each.axes[0].lines}
    for each in (near, large)
  ]
  assert colours[0]["diloco"] == colours[1]["diloco"]


def test_equal_time_is_marked_on_its_clock_alone():
  found = convergences.comparison()
  marked = {}
  for clock in ("near", "large"):
    (ax,) = figures.loss_by_time(found, clock).axes
    marked[clock] = [
      text.xy
      for text in ax.texts
      if isinstance(text, Annotation) and "equal time" in text.get_text()
    ]
  assert marked == {"near": [(1.0, 1)], "large": []}


@pytest.mark.parametrize("name", [*DRAW, "marked"])
def test_nothing_to_show_is_said(name):
  draw = DRAW.get(name, lambda found: figures.loss_by_time(found, "near"))
  figure = draw(convergences.comparison(entries=[], target_loss=0.0))
  (ax,) = figure.axes
  assert any(text.get_text() == "nothing to show" for text in ax.texts)
