import dataclasses
import math

import numpy as np
import pytest
from matplotlib.patches import StepPatch

from dilocox_jax.report import figures, load_run


def _line(ax, label):
  (found,) = [line for line in ax.lines if line.get_label() == label]
  return found


def test_the_loss_figure_shows_the_rows_against_tokens(write_run, tmp_path):
  run = load_run(write_run(tmp_path / "a"))
  figure = figures.loss_figure(run)
  assert figure is not None
  (ax,) = figure.axes
  outer = _line(ax, "validation, outer parameters")
  np.testing.assert_array_equal(
    outer.get_ydata(), [e.outer_loss for e in run.evaluations]
  )
  np.testing.assert_allclose(
    np.asarray(outer.get_xdata()), [e.tokens / 1e6 for e in run.evaluations]
  )
  assert ax.get_xlabel() == "M tokens, all replicas"
  train = _line(ax, "training, mean of replicas")
  np.testing.assert_array_equal(train.get_ydata(), [r.loss for r in run.rounds])
  for name in ("mean", "replica"):
    label = {"mean": "replicas' mean", "replica": "replica 0"}[name]
    np.testing.assert_array_equal(
      _line(ax, f"validation, {label}").get_ydata(),
      [getattr(e, f"{name}_loss") for e in run.evaluations],
    )


def test_the_warm_start_is_shaded_up_to_its_last_token(write_run, tmp_path):
  figure = figures.loss_figure(
    load_run(write_run(tmp_path / "a", warm_steps=150))
  )
  assert figure is not None
  (shade,) = figure.axes[0].patches
  corners = shade.get_patch_transform().transform(shade.get_path().vertices)
  # 150 steps x 2 replicas x 1024 tokens, in millions.
  assert (corners[:, 0].min(), corners[:, 0].max()) == (0, 0.3072)


def test_a_high_first_loss_does_not_flatten_the_curve(write_run, tmp_path):
  run = load_run(write_run(tmp_path / "a"))
  first = dataclasses.replace(run.rounds[0], loss=500.0)
  run = dataclasses.replace(run, rounds=[first, *run.rounds[1:]])
  figure = figures.loss_figure(run)
  assert figure is not None
  assert figure.axes[0].get_ylim()[1] < 6
  assert "above the axis" in figure.axes[0].get_title(loc="left")


def test_a_loss_that_is_not_finite_leaves_a_gap(write_run, tmp_path):
  run = load_run(write_run(tmp_path / "a"))
  bad = dataclasses.replace(run.rounds[-1], loss=math.nan)
  run = dataclasses.replace(run, rounds=[*run.rounds[:-1], bad])
  figure = figures.loss_figure(run)
  assert figure is not None
  train = _line(figure.axes[0], "training, mean of replicas")
  gaps = np.isnan(np.asarray(train.get_ydata()))
  assert np.flatnonzero(gaps).tolist() == [19]


def test_drift_has_a_line_a_fragment(write_run, tmp_path):
  run = load_run(write_run(tmp_path / "a", num_replicas=4, num_fragments=3))
  figure = figures.drift_figure(run)
  assert figure is not None
  for ax, field in zip(figure.axes, ("cosine", "disagreement"), strict=True):
    assert len(ax.lines) == 3
    mine = [d for r in run.rounds for d in r.drift if d.fragment == 2]
    line = _line(ax, "fragment 2")
    np.testing.assert_array_equal(line.get_xdata(), [d.step for d in mine])
    np.testing.assert_array_equal(
      line.get_ydata(), [getattr(d, field) for d in mine]
    )


def test_many_fragments_have_colours_of_their_own(write_run, tmp_path):
  figure = figures.drift_figure(
    load_run(write_run(tmp_path / "a", num_fragments=15))
  )
  assert figure is not None
  colours = {line.get_color() for line in figure.axes[0].lines}
  assert len(colours) == 15
  (legend,) = figure.legends
  assert len(legend.get_texts()) == 8


def test_the_bytes_figure_ends_at_the_total_with_the_flush(write_run, tmp_path):
  run = load_run(write_run(tmp_path / "a"))
  figure = figures.bytes_figure(run)
  assert figure is not None
  total, each = figure.axes
  drawn = np.asarray(total.lines[0].get_ydata())
  assert drawn[-1] == run.total_sent_bytes / 1e6
  assert drawn[-1] > drawn[-2] == run.rounds[-1].total_sent_bytes / 1e6
  fill = each.patches[0]
  assert isinstance(fill, StepPatch)
  np.testing.assert_array_equal(
    fill.get_data()[0], [r.sent_bytes / 1e6 for r in run.rounds]
  )
  assert total.get_ylabel() == "sent since the start (MB)"


@pytest.mark.parametrize(
  ("changes", "shown"),
  [
    ({"num_replicas": 1, "method": "single"}, ["loss"]),
    ({"method": "allreduce"}, ["loss", "bytes"]),
    ({"num_steps": 0, "finish": False}, []),
    ({}, ["loss", "drift", "bytes"]),
  ],
)
def test_a_figure_with_nothing_to_show_is_left_out(
  write_run, tmp_path, changes, shown
):
  run = load_run(write_run(tmp_path / "a", **changes))
  drawn = [
    name
    for name in ("loss", "drift", "bytes")
    if getattr(figures, f"{name}_figure")(run) is not None
  ]
  assert drawn == shown


def test_every_panel_says_whether_it_is_measured_or_derived(
  write_run, tmp_path
):
  run = load_run(write_run(tmp_path / "a"))
  drawn = [
    draw(run)
    for draw in (
      figures.loss_figure,
      figures.drift_figure,
      figures.bytes_figure,
    )
  ]
  drawn.append(figures.comparison_figure([run], ["diloco"]))
  panels = [ax for figure in drawn if figure for ax in figure.axes]
  captions = [ax.get_title(loc="left") for ax in panels]
  assert len(captions) == 7
  assert all("measured" in text or "derived" in text for text in captions)


def test_a_run_that_sends_nothing_is_left_out_of_the_bytes_panel(
  write_run, tmp_path
):
  silent = load_run(write_run(tmp_path / "a", num_replicas=1, method="single"))
  loud = load_run(write_run(tmp_path / "b"))
  figure = figures.comparison_figure([silent, loud], ["single", "diloco"])
  tokens, sent = figure.axes
  assert np.size(_line(tokens, "single").get_xdata()) == 10
  assert np.size(_line(sent, "single").get_xdata()) == 0
  assert np.size(_line(sent, "diloco").get_xdata()) == 10
  alone = figures.comparison_figure([silent], ["single"])
  assert alone.axes[1].texts[0].get_text() == "nothing to show"


def test_the_axis_of_bytes_is_labelled_in_bytes(write_run, tmp_path):
  runs = [
    load_run(write_run(tmp_path / method, method=method))
    for method in ("diloco", "allreduce")
  ]
  figure = figures.comparison_figure(runs, ["diloco", "allreduce"])
  figure.draw_without_rendering()
  sent = figure.axes[1]
  assert sent.get_xscale() == "log"
  labels = [tick.get_text() for tick in sent.get_xticklabels()]
  assert "100 MB" in labels
