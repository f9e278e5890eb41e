import dataclasses
import math

import numpy as np
import pytest
from matplotlib.patches import StepPatch

from dilocox_jax.metrics import Timing
from dilocox_jax.report import figures, load_run
from dilocox_jax.report.compare import comparison_figure


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


def test_many_fragments_are_grey_behind_their_mean(write_run, tmp_path):
  run = load_run(write_run(tmp_path / "a", num_fragments=15))
  figure = figures.drift_figure(run)
  assert figure is not None
  ax = figure.axes[0]
  assert len({line.get_color() for line in ax.lines}) == 2
  assert len(ax.lines) == 16
  mean = np.asarray(_line(ax, "mean of 15 fragments (grey)").get_ydata())
  first = [entry.cosine for entry in run.rounds[0].drift]
  assert mean[0] == pytest.approx(sum(first) / 15)
  (legend,) = figure.legends
  assert len(legend.get_texts()) == 1


def test_both_panels_of_bytes_show_the_flush(write_run, tmp_path):
  run = load_run(write_run(tmp_path / "a"))
  figure = figures.bytes_figure(run)
  assert figure is not None
  total, each = figure.axes
  before = run.rounds[-1].total_sent_bytes
  after = run.total_sent_bytes
  for ax, low, high in ((total, before, after), (each, 0, after - before)):
    flush = _line(ax, "flush")
    np.testing.assert_allclose(
      np.asarray(flush.get_xydata()), [[600, low / 1e6], [600, high / 1e6]]
    )
  assert "3.48 MB of it in the flush" in figure.get_suptitle()
  rounds = np.asarray(_line(total, "rounds").get_ydata())
  assert rounds[-1] == before / 1e6
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
  drawn.append(comparison_figure({"diloco": run}))
  panels = [ax for figure in drawn if figure for ax in figure.axes]
  captions = [ax.get_title(loc="left") for ax in panels]
  assert len(captions) == 7
  assert all("measured" in text or "derived" in text for text in captions)


def with_clock(run, seconds_a_step):
  timings = [
    Timing(e.step, "evaluation", 1.0, math.nan, e.step * seconds_a_step)
    for e in run.evaluations
  ]
  return dataclasses.replace(run, timings=run.timings + timings)


@pytest.mark.parametrize(
  "seconds_a_step, divisor, unit", [(0.001, 1, "s"), (500.0, 3600, "h")]
)
def test_the_figure_shows_loss_against_the_time_of_the_clock(
  seconds_a_step, divisor, unit, write_run, tmp_path
):
  run = load_run(write_run(tmp_path))
  figure = figures.time_figure(with_clock(run, seconds_a_step))
  assert figure
  (ax,) = figure.axes
  (line,) = ax.get_lines()
  at = [e.step * seconds_a_step / divisor for e in run.evaluations]
  np.testing.assert_allclose(np.asarray(line.get_xdata()), at)
  np.testing.assert_allclose(
    np.asarray(line.get_ydata()), [e.outer_loss for e in run.evaluations]
  )
  assert ax.get_xlabel() == f"simulated time ({unit})\nthe given cluster"
  assert f"{run.validation_loss:.4f}" in figure.get_suptitle()


def test_a_run_without_a_clock_has_no_such_figure(write_run, tmp_path):
  assert figures.time_figure(load_run(write_run(tmp_path))) is None


def with_ranks(run, values):
  """The run with low-rank updates in every round that has a drift."""
  rounds, left = [], iter(values)
  for row in run.rounds:
    drift = [
      dataclasses.replace(
        entry, rank=rank, energy_rank=rank - 1, stable_rank=2.0
      )
      for entry, rank in zip(row.drift, left, strict=False)
    ]
    rounds.append(dataclasses.replace(row, drift=drift))
  return dataclasses.replace(run, rounds=rounds)


def test_the_figure_shows_what_was_measured_and_what_was_sent(
  write_run, tmp_path
):
  run = load_run(write_run(tmp_path))
  count = sum(len(row.drift) for row in run.rounds)
  values = np.linspace(16, 4, count).tolist()
  figure = figures.rank_figure(with_ranks(run, values))
  assert figure
  left, right = figure.axes
  lines = {
    line.get_label(): np.asarray(line.get_ydata()) for line in left.get_lines()
  }
  np.testing.assert_allclose(lines["sent"], values)
  energy = [value - 1 for value in values]
  np.testing.assert_allclose(lines["measured, by energy"], energy)
  assert np.all(np.asarray(lines["measured, stable rank"]) == 2)
  assert figure.get_suptitle() == "The rank went from 16 to 4, H at 30"
  (steps,) = right.get_lines()
  lengths = np.diff([0, *(row.step for row in run.rounds)])
  np.testing.assert_array_equal(steps.get_ydata(), lengths)


@pytest.mark.parametrize(
  "last, cap, title",
  [
    (16.0, 16, "The rank stayed at its cap of 16, H at 30"),
    (15.8, 32, "The rank stayed at 15.8, H at 30"),
  ],
)
def test_a_rank_that_stays_is_said_to_stay(
  last, cap, title, write_run, tmp_path
):
  run = load_run(write_run(tmp_path))
  run = dataclasses.replace(run, config={"codec": {"rank": cap}})
  figure = figures.rank_figure(with_ranks(run, np.linspace(15.8, last, 20)))
  assert figure and figure.get_suptitle() == title


def test_a_run_without_low_rank_has_no_figure_of_ranks(write_run, tmp_path):
  assert figures.rank_figure(load_run(write_run(tmp_path))) is None
