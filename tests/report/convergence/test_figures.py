import dataclasses
import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation

from dilocox_jax.report.convergence import figures as figures
from experiments.configs import convergence_small
from experiments.sweeps.method_list import FRONT
from tests.report import convergences

DRAW = {
  "tokens": figures.loss_by_tokens,
  "bytes": figures.loss_by_bytes,
  "hours": lambda found: figures.loss_by_time(found, "large"),
}


def lines(figure):
  (ax,) = figure.axes
  return {
    name: np.asarray(line.get_xydata())
    for line in ax.lines
    if (name := line.get_gid())
  }


@pytest.mark.parametrize(
  "name, last", [("tokens", 4.0), ("bytes", 1e7), ("hours", 60.0)]
)
def test_a_line_is_the_mean_of_the_seeds(name, last):
  found = lines(DRAW[name](convergences.comparison()))
  assert list(found) == ["allreduce", "diloco", "dilocox", "eager", "wild"]
  assert found["diloco"].shape == (4, 2)
  assert found["diloco"][-1] == pytest.approx((last, 1.06))


def test_a_band_reaches_from_the_lowest_seed_to_the_highest():
  (ax,) = figures.loss_by_tokens(convergences.comparison()).axes
  vertices = np.asarray(ax.collections[1].get_paths()[0].vertices)
  at_end = vertices[vertices[:, 0] == 4.0][:, 1]
  assert (min(at_end), max(at_end)) == pytest.approx((1.05, 1.07))


def in_front(figure):
  """Names in the legend, without those that name no method."""
  (legend,) = figure.legends
  names = [text.get_text() for text in legend.get_texts()]
  return [n for n in names if "other method" not in n and "Pareto" not in n]


def test_a_curve_of_fewer_seeds_says_so():
  figure = figures.loss_by_tokens(convergences.comparison())
  assert "eager (1 of 2 seeds)" in in_front(figure)


def test_six_methods_of_a_sweep_are_in_front_and_look_different():
  methods = convergence_small.get_config().to_dict()["methods"]
  entries = [convergences.entry(each["name"], 1.0) for each in methods]
  found = convergences.comparison(entries=entries, front=FRONT, seeds=1)
  figure = figures.loss_by_tokens(found)
  (ax,) = figure.axes
  assert in_front(figure)[:4] == [
    *("allreduce", "overlap_loco", "allreduce_muon_average", "muloco")
  ]
  shown = [x for x in ax.lines if not str(x.get_label()).startswith("_")]
  colours = {x.get_color() for x in shown}
  assert len(in_front(figure)) == 6 and len(colours) == len(shown) == 7
  assert f"{len(methods) - 6} other methods" in str(
    [x.get_label() for x in shown]
  )


def test_a_family_in_front_is_the_method_of_the_clock():
  entries = [convergences.entry("allreduce", 1.0, 1.0)]
  entries += [
    convergences.entry(f"{name}_{clock}", 1.2, 1.2, clock=clock)
    for name in ("a", "b", "c", "d", "e", "f", "ours")
    for clock in ("near", "large")
  ]
  found = convergences.comparison(entries=entries, front=("ours",))
  for clock in ("near", "large"):
    shown = in_front(figures.loss_by_time(found, clock))
    assert shown[:2] == ["allreduce", f"ours_{clock}"]
  shown = in_front(figures.loss_by_tokens(found))
  assert shown[1] == "ours_near" and "ours_large" not in shown


def test_the_method_of_the_title_is_in_front():
  names = [f"slow{n}" for n in range(6)]
  entries = [convergences.entry("allreduce", 1.0, 1.0)]
  entries += [convergences.entry(name, 1.19, 1.19) for name in names]
  entries += [convergences.entry("quick", 1.05, 1.05)]
  found = convergences.comparison(
    entries=entries, front=tuple(names), target_loss=1.2
  )
  figure = figures.loss_by_time(found, "large")
  first = figures._first(found, "large")
  assert first and first.name == "quick"
  assert "quick" in figure.get_suptitle() and "quick" in in_front(figure)


def test_titles_state_what_the_numbers_say():
  found = convergences.comparison(target_loss=1.2)
  titles = {name: draw(found).get_suptitle() for name, draw in DRAW.items()}
  # Means: allreduce 1.01, diloco 1.06, dilocox 1.08; bytes 1e9, 1e7, 1e6.
  assert titles["tokens"].replace("\n", " ") == (
    "At equal tokens diloco ends nearest to allreduce: its loss is 5.0 ± 0.0 %"
    " higher"
  )
  assert titles["bytes"] == (
    "dilocox sends 1000x less than allreduce; its loss is 6.9 ± 0.9 % higher"
  )
  by_time = titles["hours"].replace("\n", " ")
  assert by_time.startswith("On 'large' diloco reaches loss 1.2 in ")
  assert ", allreduce in " in by_time


def test_the_nearest_may_be_above_or_below():
  entries = [
    convergences.entry("allreduce", 1.0, 1.0),
    convergences.entry("lower", 0.96, 0.96),
    convergences.entry("nearer", 1.01, 1.01),
  ]
  found = convergences.comparison(entries=entries)
  title = figures.loss_by_tokens(found).get_suptitle().replace("\n", " ")
  assert (
    "nearer ends nearest to allreduce: its loss is 1.0 ± 0.0 % higher" in title
  )


def test_titles_compare_with_the_baseline_of_the_same_inner_optimizer():
  entries = [
    *convergences.comparison().entries,
    convergences.entry("muon", 0.7, 0.7, baseline="allreduce"),
    convergences.entry("muloco", 0.71, 0.71, baseline="muon"),
  ]
  found = convergences.comparison(entries=entries)
  title = figures.loss_by_tokens(found).get_suptitle()
  assert "muloco ends nearest to muon: its loss is" in title.replace("\n", " ")
  assert "1.4 ± 0.0 % higher" in title


def test_a_grey_curve_below_all_in_front_is_named():
  entries = [
    convergences.entry("allreduce", 1.0, 1.0),
    *(convergences.entry(n, 1.1, 1.1) for n in "abcdef"),
    convergences.entry("lowest", 0.9, 0.9),
  ]
  found = convergences.comparison(entries=entries, front=tuple("abcdef"))
  (ax,) = figures.loss_by_tokens(found).axes
  assert "lowest" in [text.get_text() for text in ax.texts]


def test_no_method_above_the_axis_is_in_the_legend():
  entries = [*convergences.comparison().entries]
  entries.append(convergences.entry("lost", 2.4, 2.5))
  found = convergences.comparison(entries=entries, front=("lost",))
  assert "lost" not in in_front(figures.loss_by_tokens(found))


def test_the_pareto_front_joins_the_ends_that_nothing_beats():
  (ax,) = figures.loss_by_bytes(convergences.comparison()).axes
  (front,) = [x for x in ax.lines if "Pareto" in str(x.get_label())]
  np.testing.assert_allclose(
    np.asarray(front.get_xydata()),
    # eager sent 1000 bytes and ends at 1.2.
    [[1e3, 1.2], [1e6, 1.08], [1e7, 1.06], [1e9, 1.01]],
  )


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
    {x.get_gid(): x.get_color() for x in each.axes[0].lines}
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
  assert marked == {"near": [(3600.0, 1)], "large": []}


@pytest.mark.parametrize("name", [*DRAW, "marked"])
def test_nothing_to_show_is_said(name):
  draw = DRAW.get(name, lambda found: figures.loss_by_time(found, "near"))
  figure = draw(convergences.comparison(entries=[], target_loss=0.0))
  (ax,) = figure.axes
  assert any(text.get_text() == "nothing to show" for text in ax.texts)


def test_a_title_compares_with_a_whole_baseline_alone():
  entries = [
    convergences.entry("allreduce", 3.0),
    convergences.entry("diloco", 3.2, 3.3),
  ]
  figure = figures.loss_by_tokens(convergences.comparison(entries=entries))
  assert figure.get_suptitle() == "Validation loss at equal tokens"


def test_a_seed_that_diverged_does_not_cut_the_curve_of_the_others():
  whole = convergences.entry("diloco", 1.05, 1.07)
  begun = dataclasses.replace(
    whole.traces[1], loss=math.nan, points=whole.traces[1].points[:1]
  )
  entry = dataclasses.replace(whole, traces=[whole.traces[0], begun])
  others = [convergences.entry("allreduce", 1.0, 1.1)]
  found = convergences.comparison(entries=[*others, entry])
  figure = figures.loss_by_tokens(found)
  assert lines(figure)["diloco"].shape == (4, 2)
