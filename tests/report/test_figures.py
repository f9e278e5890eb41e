import dataclasses
import math

import numpy as np
import pytest

from dilocox_jax.metrics import Timing
from dilocox_jax.report import figures, load_run


def drawn(draw, run):
  figure = draw(run)
  assert figure is not None
  for ax in figure.axes:
    caption = ax.get_title(loc="left")
    assert any(word in caption for word in ("measured", "derived", "chosen"))
  return figure


def line(ax, label):
  (found,) = [each for each in ax.lines if each.get_label() == label]
  return found


def test_the_loss_figure_shows_the_rows_against_tokens(write_run, tmp_path):
  run = load_run(write_run(tmp_path, warm_steps=150))
  first = dataclasses.replace(run.rounds[0], loss=500.0)
  last = dataclasses.replace(run.rounds[-1], loss=math.nan)
  run = dataclasses.replace(run, rounds=[first, *run.rounds[1:-1], last])
  (ax,) = drawn(figures.loss_figure, run).axes
  for label, field in (
    ("outer parameters", "outer_loss"),
    ("replicas' mean", "mean_loss"),
    ("replica 0", "replica_loss"),
  ):
    found = line(ax, f"validation, {label}")
    values = [getattr(each, field) for each in run.evaluations]
    np.testing.assert_array_equal(found.get_ydata(), values)
    at = [each.tokens / 1e6 for each in run.evaluations]
    np.testing.assert_allclose(np.asarray(found.get_xdata()), at)
  trained = np.asarray(line(ax, "training, mean of replicas").get_ydata())
  assert np.flatnonzero(np.isnan(trained)).tolist() == [19]
  # The first loss flattens nothing.
  assert ax.get_ylim()[1] < 6
  (shade,) = ax.patches
  corners = shade.get_patch_transform().transform(shade.get_path().vertices)
  # 150 steps x 2 replicas x 1024 tokens, in millions.
  assert (corners[:, 0].min(), corners[:, 0].max()) == (0, 0.3072)


@pytest.mark.parametrize(("count", "colours"), [(3, 3), (15, 2)])
def test_drift_has_a_line_a_fragment_and_a_mean_of_many(
  write_run, tmp_path, count, colours
):
  run = load_run(write_run(tmp_path, num_fragments=count))
  figure = drawn(figures.drift_figure, run)
  for ax, field in zip(figure.axes, ("cosine", "disagreement"), strict=True):
    assert len({each.get_color() for each in ax.lines}) == colours
    own = [d for r in run.rounds for d in r.drift if d.fragment == 2]
    values = [getattr(each, field) for each in own]
    np.testing.assert_array_equal(ax.lines[2].get_ydata(), values)
  if count == 15:
    mean = line(figure.axes[0], "mean of 15 fragments (grey)").get_ydata()
    first = [entry.cosine for entry in run.rounds[0].drift]
    assert np.asarray(mean)[0] == pytest.approx(sum(first) / 15)


def test_both_panels_of_bytes_show_the_flush(write_run, tmp_path):
  run = load_run(write_run(tmp_path))
  figure = drawn(figures.bytes_figure, run)
  total, each = figure.axes
  before, after = run.rounds[-1].total_sent_bytes, run.total_sent_bytes
  for ax, low, high in ((total, before, after), (each, 0, after - before)):
    flush = np.asarray(line(ax, "flush").get_xydata())
    np.testing.assert_allclose(flush, [[600, low / 1e6], [600, high / 1e6]])
  assert "3.48 MB of it in the flush" in figure.get_suptitle()
  assert np.asarray(line(total, "rounds").get_ydata())[-1] == before / 1e6


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
  run = load_run(write_run(tmp_path, **changes))
  names = ("loss", "drift", "bytes", "time", "rank")
  found = [n for n in names if getattr(figures, f"{n}_figure")(run) is not None]
  assert found == shown


@pytest.mark.parametrize(
  "seconds_a_step, divisor, unit", [(0.001, 1, "s"), (500.0, 3600, "h")]
)
def test_the_figure_shows_loss_against_the_time_of_the_clock(
  seconds_a_step, divisor, unit, write_run, tmp_path
):
  run = load_run(write_run(tmp_path))
  at_s = {each.step: each.step * seconds_a_step for each in run.evaluations}
  timings = [
    Timing(step, "evaluation", 1.0, math.nan, now_s)
    for step, now_s in at_s.items()
  ]
  run = dataclasses.replace(run, timings=timings)
  figure = drawn(figures.time_figure, run)
  (ax,) = figure.axes
  (found,) = ax.get_lines()
  np.testing.assert_allclose(
    np.asarray(found.get_xdata()), [s / divisor for s in at_s.values()]
  )
  losses = [each.outer_loss for each in run.evaluations]
  np.testing.assert_allclose(np.asarray(found.get_ydata()), losses)
  assert f"({unit})" in ax.get_xlabel()
  assert "the given cluster" in ax.get_xlabel()


def with_ranks(run, values):
  """The run with low-rank updates in every round that has a drift."""
  left = iter(values)
  rounds = [
    dataclasses.replace(
      row,
      drift=[
        dataclasses.replace(each, rank=r, energy_rank=r - 1, stable_rank=2.0)
        for each, r in zip(row.drift, left, strict=False)
      ],
    )
    for row in run.rounds
  ]
  return dataclasses.replace(run, rounds=rounds)


@pytest.mark.parametrize(
  ("first", "last", "cap", "words"),
  [
    (16.0, 4.0, 0, "went from 16 to 4, H at 30"),
    (15.8, 16.0, 16, "stayed at its cap of 16, H at 30"),
    (15.8, 15.8, 32, "stayed at 15.8, H at 30"),
  ],
)
def test_ranks_and_rounds_are_drawn_and_said(
  first, last, cap, words, write_run, tmp_path
):
  run = load_run(write_run(tmp_path))
  codec = f"low_rank(rank={cap})+int"
  run = dataclasses.replace(run, config={"exchange": {"codec": codec}})
  values = np.linspace(first, last, 20).tolist()
  figure = figures.rank_figure(with_ranks(run, values))
  assert figure and words in figure.get_suptitle()
  left, right = figure.axes
  np.testing.assert_allclose(np.asarray(line(left, "sent").get_ydata()), values)
  energy = np.asarray(line(left, "measured, by energy").get_ydata())
  np.testing.assert_allclose(energy, np.asarray(values) - 1)
  (steps,) = right.get_lines()
  lengths = np.diff([0, *(row.step for row in run.rounds)])
  np.testing.assert_array_equal(steps.get_ydata(), lengths)
