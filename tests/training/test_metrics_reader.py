import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax import metrics
from dilocox_jax.distributed import link_counter
from dilocox_jax.metrics import read_rows
from dilocox_jax.outer.drift import Drift
from dilocox_jax.outer.window import StepMetrics
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule
from dilocox_jax.training import metrics_reader, run_text
from dilocox_jax.training.metrics_reader import DispatchedSegment, MetricsReader
from dilocox_jax.training.progress_bar import ProgressBar
from dilocox_jax.training.states import TrainingProgress
from dilocox_jax.training.stops import NotFiniteError
from tests import runs

SCHEDULE = SyncSchedule(4)
# The second round of a run whose warm start took ten steps.
SEGMENT = Segment(
  "rounds", 14, 4, tuple(SCHEDULE.windows(4, 8)), schedule_start=10
)


class Bar(ProgressBar):
  """A bar that keeps what it was told."""

  def __init__(self):
    super().__init__("diloco", 100)
    self.told = []

  def update(self, *args):
    self.told.append(args)


@pytest.fixture(name="desk")
def desk_fixture(tmp_path, monkeypatch):
  """A reader with its files, its bar and a clock set by hand."""
  now = [100.0]
  clock = SimpleNamespace(perf_counter=lambda: now[0])
  monkeypatch.setattr(metrics_reader, "time", clock)
  bar = Bar()
  with metrics.Recorder(tmp_path) as recorder:
    schedule = optax.linear_schedule(0.0, 1.0, 100)
    before = TrainingProgress(14, 560, 4_700)
    book = MetricsReader(recorder, bar, schedule, 0.9, before)
    yield SimpleNamespace(book=book, bar=bar, workdir=tmp_path, now=now)


def _dispatched(loss=None, grad_norm=None, *, own_squared=9.0, tokens=720):
  values = np.arange(8, dtype=np.float32).reshape(2, 4)
  # Two replicas that sent the same, two away from the mean.
  own = jnp.array([9.0, own_squared])
  drift = Drift(own, jnp.full(2, 4.0), jnp.float32(9.0), {})
  return DispatchedSegment(
    SEGMENT,
    TrainingProgress(18, tokens, 5_000),
    metrics=StepMetrics(
      jnp.asarray(values if loss is None else loss),
      jnp.asarray(2.0 * values if grad_norm is None else grad_norm),
    ),
    drifts=[drift],
  )


def test_a_segment_becomes_a_row_of_means(desk):
  desk.now[0] += 1.0
  desk.book.read(_dispatched())
  (row,) = runs.rows(desk.workdir)
  assert row == {
    "kind": "round",
    "step": 18,
    "tokens": 720,
    "phase": "rounds",
    "loss": 3.5,
    "loss_per_replica": [1.5, 5.5],
    "grad_norm": 7.0,
    "learning_rate": pytest.approx(0.17, rel=1e-6),  # Of the last step done.
    "sent_bytes": 300,
    "total_sent_bytes": 5_000,
    "drift": [
      {
        "fragment": 0,
        "step": 18,
        "cosine": 1.0,
        "disagreement": 2.0,
        "pseudo_gradient_norm": 3.0,
        "rank": None,
        "energy_rank": None,
        "stable_rank": None,
      }
    ],
  }


def test_what_an_evaluation_sends_belongs_to_no_round(desk):
  before = TrainingProgress(14, 560, 4_700)
  names = "outer_loss", "mean_loss", "replica_loss"
  losses = dict.fromkeys(names, 1.0)
  desk.book.record_evaluation(losses, before.after(200))
  desk.now[0] += 1.0
  desk.book.read(_dispatched())
  _, row = runs.rows(desk.workdir)
  assert (row["sent_bytes"], row["total_sent_bytes"]) == (100, 5_000)
  with pytest.raises(AttributeError):
    # Rows that are not read yet share it.
    before.total_sent_bytes += 1  # pyright: ignore


def test_time_is_booked_from_one_booking_to_the_next(desk):
  desk.now[0] += 3.0
  desk.book.record_time("compile", 14)
  desk.now[0] += 4.0
  desk.book.read(_dispatched())
  desk.now[0] += 0.5
  desk.book.record_time("evaluation", 18)
  rows = read_rows(desk.workdir / "timing.jsonl")
  assert [(r["event"], r["step"], r["wall_s"]) for r in rows] == [
    ("compile", 14, 3.0),
    ("round", 18, 4.0),
    ("evaluation", 18, 0.5),
  ]
  assert [r["tokens_per_s"] for r in rows] == [None, 160 / 4.0, None]


def test_the_bar_shows_the_speed_of_training_alone(desk):
  desk.now[0] += 100.0
  desk.book.record_time("compile", 14)
  desk.now[0] += 1.0
  desk.book.read(_dispatched())
  desk.now[0] += 3.0
  desk.book.read(_dispatched(tokens=880))
  speeds = [speed for _, _, speed, *_ in desk.bar.told]
  assert speeds == [160.0, 320 / 4.0]
  assert desk.bar.told[0][:4] == (18, 3.5, 160.0, 5_000)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_a_value_that_is_not_finite_is_named_and_not_recorded(desk, field, bad):
  values = np.ones((2, 4), np.float32)
  values[1, 2] = bad
  with pytest.raises(NotFiniteError, match="at step 17 on replica 1"):
    desk.book.read(
      _dispatched(values) if field == "loss" else _dispatched(None, values)
    )
  assert not runs.rows(desk.workdir)
  assert not read_rows(desk.workdir / "timing.jsonl")
  assert not desk.bar.told


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_replica_that_sent_what_is_not_finite_is_named(desk, bad):
  dispatched = _dispatched(own_squared=bad)
  line = "norm of the pseudo-gradient is not finite at step 18 on replica 1"
  with pytest.raises(NotFiniteError, match=line):
    desk.book.read(dispatched)
  with pytest.raises(NotFiniteError, match="at step 21 on replica 1"):
    desk.book.check_flush(dispatched.drifts, 21)
  desk.book.check_flush([], 21)
  assert not runs.rows(desk.workdir)


def _opened(workdir, held_out=0, writes=True):
  config = runs.settings()
  return metrics_reader.open_reader(
    config,
    workdir,
    data=dataclasses.replace(
      run_text.run_data(config),
      validation=[np.full((1, 2, 3), held_out, np.int32)],
    ),
    programs=runs.programs(config),
    handed_in=(),
    command="train",
    progress=TrainingProgress(),
    is_resumed=False,
    writes=writes,
  )


def test_the_record_names_the_windows_of_the_evaluations(tmp_path):
  def digest(held_out):
    with _opened(tmp_path, held_out):
      return json.loads((tmp_path / "run.json").read_text())["held_out_digest"]

  assert digest(0) == digest(0) != digest(1)


def test_the_bytes_of_a_link_are_recorded_for_each_event(tmp_path, monkeypatch):
  sent = itertools.count(step=70)
  monkeypatch.setenv(link_counter.LINK_VARIABLE, "wan")
  monkeypatch.setattr(link_counter, "sent_bytes", lambda interface: next(sent))
  with _opened(tmp_path) as book:
    assert book.reads_at_once
    book.read(_dispatched())
    book.record_time("checkpoint", 18)
  rows = read_rows(tmp_path / "timing.jsonl")
  assert [row["link_bytes"] for row in rows] == [70, 70]


def test_beside_the_main_process_all_is_checked_and_nothing_written(
  tmp_path, monkeypatch, capfd
):
  monkeypatch.setattr(metrics_reader.processes, "is_main", lambda: False)
  with _opened(tmp_path / "run", writes=False) as book:
    assert book.read(_dispatched())
    losses = {"outer_loss": 1.0, "mean_loss": None}
    book.record_evaluation(losses, TrainingProgress(18))
    with pytest.raises(NotFiniteError, match="validation loss"):
      book.record_evaluation({"outer_loss": math.nan}, TrainingProgress(18))
  assert not (tmp_path / "run").exists() and not capfd.readouterr().out


def test_another_process_writes_if_its_directory_is_its_own(
  tmp_path, monkeypatch, capfd
):
  monkeypatch.setattr(metrics_reader.processes, "is_main", lambda: False)
  with _opened(tmp_path) as book:
    assert book.read(_dispatched())
  assert runs.rows(tmp_path, "round") and not capfd.readouterr().out
