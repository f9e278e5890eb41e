"""Figures hold the numbers they were given, and methods keep their looks."""

import dataclasses

import numpy as np
import pytest

from dilocox_jax.report import figures, load_run, panels, style
from tests.report.frames import ALLREDUCE, BOTH, CLOCK, frame, setting


def drawn(draw, run):
  """The axes of a figure, each of which says what kind of numbers it has."""
  figure = draw(run)
  assert figure is not None
  for ax in figure.axes:
    caption = ax.get_title(loc="left")
    assert any(word in caption for word in ("measured", "derived", "chosen"))
    assert ax.get_xlabel()
  return figure.axes


def panel(found, axis):
  """The axes of a picture of a frame."""
  (ax,) = panels.loss_panel(found, axis, "what it shows").axes
  return ax


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


def test_drift_has_a_line_a_fragment_and_their_mean(write_run, tmp_path):
  run = load_run(write_run(tmp_path, num_fragments=3, num_steps=90))
  axes = drawn(figures.drift_figure, run)
  for ax, field in zip(axes, ("cosine", "disagreement"), strict=True):
    own = [d for r in run.rounds for d in r.drift if d.fragment == 2]
    rows = [(each.step, getattr(each, field)) for each in own]
    assert (
      np.array(ax.lines[2].get_data()).T.tolist() == np.array(rows).tolist()
    )
    first = [getattr(entry, field) for entry in run.rounds[0].drift]
    mean = curves(ax)["mean of fragments (3, gray)"]
    assert mean[1, 0] == pytest.approx(np.mean(first))


def test_time_is_that_of_the_clock(run):
  (ax,) = drawn(figures.time_figure, run)
  rows = [(each.step / 360, each.outer_loss) for each in run.evaluations]
  np.testing.assert_allclose(curves(ax)["diloco"].T, rows)
  assert "(h)" in ax.get_xlabel() and "1gbit" in ax.get_xlabel()


def test_without_an_evaluation_there_is_no_time(run):
  # The time of an evaluation is written before the evaluation itself.
  early = dataclasses.replace(run, evaluations=[], finished=False)
  assert figures.time_figure(early) is None


def test_ranks_and_rounds_are_drawn(run):
  left, right = drawn(figures.rank_figure, run)
  entries = [entry for row in run.rounds for entry in row.drift]
  values = [entry.energy_rank for entry in entries]
  assert curves(left)["measured, by energy"][1].tolist() == values
  (rounds,) = curves(right).values()
  assert rounds.T.tolist() == [[step, 30] for step in range(180, 601, 30)]


@pytest.mark.parametrize(
  ("axis", "x", "scale"),
  [
    (CLOCK, 100.0, "log"),
    (panels.TOKENS, 1.0, "linear"),
    (panels.BYTES, 1000.0, "log"),
  ],
)
def test_a_curve_is_the_mean_over_seeds_against_a_cost(axis, x, scale):
  ax = panel(BOTH, axis)
  assert curves(ax)["diloco"][:, -1] == pytest.approx([x, 3.05])
  assert "measured" in ax.get_title(loc="left")
  low, high = ax.collections[1].get_datalim(ax.transData).intervaly
  assert (low, high) == pytest.approx((2.06, 6.04))
  assert ax.get_xscale() == scale
  assert ("log scale" in ax.get_xlabel()) == (scale == "log")
  assert (axis == CLOCK) == ("tiny on 1gbit" in ax.get_xlabel())


def test_a_setting_that_sends_nothing_is_left_out_of_the_bytes():
  some = frame(ALLREDUCE, setting("single", [2.0, 2.0], 0))
  assert "single" in curves(panel(some, panels.TOKENS))
  assert "single" not in curves(panel(some, panels.BYTES))
  ax = panel(frame(some.settings[1]), panels.BYTES)
  assert ax.texts[0].get_text() == "nothing to show"


def test_what_reaches_the_target_first_is_no_baseline():
  fast = setting("fast", [2.0, 2.0], 10, seconds={CLOCK: 1.0})
  found = panels.first_to(frame(ALLREDUCE, fast, target=2.5), CLOCK)
  assert found and found.name == "fast"
  assert panels.first_to(frame(ALLREDUCE, fast), CLOCK) is None


@pytest.mark.parametrize(
  ("name", "like"),
  [
    ("DiLoCoX", "dilocox_reset_1gbit"),
    ("Streaming DiLoCo", "streaming_e3m0"),
    ("AllReduce", "allreduce_muon"),
  ],
)
def test_a_method_looks_alike_under_all_its_names(name, like):
  both = style.looks([name, like])
  assert both[name]["color"] == both[like]["color"]
  assert both[name]["linestyle"] != both[like]["linestyle"]
  assert (both[name]["color"] == "black") == (name == "AllReduce")
  others = style.looks(["30 Mbit/s", "1 Gbit/s", "DiLoCo", "DiLoCoX"])
  first, second, third, fourth = (x["color"] for x in others.values())
  assert first != second and third != fourth


def test_names_of_points_do_not_overlap():
  figure, (ax,) = style.frame(1, "")
  ax.plot([0, 1], [0, 1])
  close = [(f"name {n}", 0.5, 0.4 + n / 50) for n in range(6)]
  panels.name_points(figure, ax, [*close, ("outside", 0.5, 9.0)])
  boxes = [text.get_window_extent() for text in ax.texts]
  assert 0 < len(boxes) < len(close)
  assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
