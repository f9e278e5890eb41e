"""What a run says: rows, times, lines, and before it what it is."""

import contextlib
import dataclasses
import itertools
import json
import math
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax import optimizers
from dilocox_jax.distributed import link_counter
from dilocox_jax.metrics.lines import read_rows
from dilocox_jax.outer.drift import Drift
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule
from dilocox_jax.rounds.window import StepMetrics
from dilocox_jax.training import (
  metrics_reader,
  run_summary,
  run_text,
  wall_time,
)
from dilocox_jax.training.metrics_reader import (
  DispatchedSegment,
  MetricsReader,
)
from dilocox_jax.training.overrides import NO_OVERRIDES, Overrides
from dilocox_jax.training.progress import ProgressLog
from dilocox_jax.training.states import NotFiniteError, TrainingProgress
from tests import runs

CONFIG = runs.settings(method="diloco", total_steps=100)
COMPILING = "/jax/core/compile/backend_compile_duration"
# The second round of a run whose warm start took ten steps.
SEGMENT = Segment(
  "rounds", 14, 4, tuple(SyncSchedule(4).windows(4, 8)), schedule_start=10
)


@pytest.fixture(name="desk")
def desk_fixture(tmp_path, monkeypatch):
  """A reader with its files, its log and a clock set by hand."""
  now = [100.0]
  told = []
  clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
  monkeypatch.setattr(metrics_reader, "time", clock)
  monkeypatch.setattr(ProgressLog, "update", lambda _, *args: told.append(args))
  before = TrainingProgress(14, 560, 4_700)
  book = MetricsReader("diloco", runs.programs(CONFIG), tmp_path, before)
  yield SimpleNamespace(book=book, told=told, workdir=tmp_path, now=now)
  with contextlib.suppress(AssertionError):  # A test has closed it.
    book.close()


def _dispatched(
  loss=None, grad_norm=None, *, own_squared=9.0, tokens=720, ready_s=101.0
):
  """A segment that the devices have computed at a time."""
  ready = Future()
  ready.set_result(ready_s)
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
    ready_s=ready,
    note="2 here",
  )


def test_a_segment_becomes_a_row_of_means(desk):
  desk.now[0] += 1.0
  desk.book.read(_dispatched())
  (row,) = runs.rows(desk.workdir)
  rate: Any = runs.programs(CONFIG).schedule(17)  # Of the last step done.
  assert row == {
    "kind": "round",
    "step": 18,
    "tokens": 720,
    "phase": "rounds",
    "loss": 3.5,
    "loss_per_replica": [1.5, 5.5],
    "grad_norm": 7.0,
    "learning_rate": pytest.approx(float(rate), rel=1e-6),
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
        "observed": {},
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


def test_nothing_is_recorded_of_an_evaluation_that_is_not_finite(desk):
  losses = {"outer_loss": 1.0, "mean_loss": None, "replica_loss": math.nan}
  with pytest.raises(NotFiniteError, match="validation loss .* at step 14"):
    desk.book.record_evaluation(losses, TrainingProgress(14, 560, 4_700))
  assert not list(read_rows(desk.workdir / "timing.jsonl"))
  assert not runs.rows(desk.workdir)


def _timings(workdir):
  rows = read_rows(workdir / "timing.jsonl")
  return [(row["event"], row["step"], row["wall_s"]) for row in rows]


def test_a_round_takes_the_time_that_the_devices_took(desk):
  """However late it is read: here all three are, when the last has ended."""
  for tokens, ready_s in ((720, 102.0), (880, 103.5), (1040, 104.5)):
    desk.now[0] = 110.0
    desk.book.read(_dispatched(tokens=tokens, ready_s=ready_s))
  assert _timings(desk.workdir) == [
    ("round", 18, 2.0),
    ("round", 18, 1.5),
    ("round", 18, 1.0),
  ]
  rows = read_rows(desk.workdir / "timing.jsonl")
  assert [row["tokens_per_s"] for row in rows] == [80.0, 160 / 1.5, 160.0]


def test_what_comes_between_two_rounds_counts_for_neither(desk):
  desk.book.read(_dispatched(ready_s=101.0))
  desk.now[0] = 101.5
  desk.book.record_time("evaluation", 18)
  desk.now[0] = 103.5
  desk.book.record_time("checkpoint", 18)
  desk.book.read(_dispatched(tokens=880, ready_s=106.5))
  assert _timings(desk.workdir) == [
    ("round", 18, 1.0),
    ("evaluation", 18, 0.5),
    ("checkpoint", 18, 2.0),
    ("round", 18, 3.0),
  ]
  assert desk.told[0][1:] == (3.5, "2 here")
  assert [each.tokens for each, *_ in desk.told] == [720, 880]


def test_compiling_is_a_row_in_front_of_what_it_was_for(desk, monkeypatch):
  now = desk.now
  clock = SimpleNamespace(perf_counter=lambda: now[0])
  monkeypatch.setattr(wall_time, "time", clock)
  for end_s, duration_s in ((103.0, 1.0), (104.0, 3.0), (104.5, 2.0)):
    now[0] = (
      end_s  # The last began in the second, which began before the first.
    )
    jax.monitoring.record_event_duration_secs(COMPILING, duration_s)
  jax.monitoring.record_event_duration_secs("/jax/other", 9.0)
  desk.book.read(_dispatched(ready_s=106.0))
  desk.book.read(_dispatched(tokens=880, ready_s=107.0))
  assert _timings(desk.workdir) == [
    ("compile", 18, 3.5),
    ("round", 18, 2.5),
    ("round", 18, 1.0),
  ]
  desk.book.close()
  jax.monitoring.record_event_duration_secs(COMPILING, 1.0)
  desk.now[0] = 108.0
  desk.book.record_time("checkpoint", 18)
  assert _timings(desk.workdir)[-1] == ("checkpoint", 18, 1.0)


def test_a_segment_is_ready_when_its_arrays_are():
  begin = threading.Event()
  end = threading.Event()

  class Slow:
    def block_until_ready(self):
      begin.set()
      assert end.wait(60)

  ready_s = wall_time.ready_time([Slow()])
  assert begin.wait(60) and not ready_s.done()
  before_s = time.perf_counter()
  end.set()
  assert before_s <= ready_s.result() <= time.perf_counter()


@pytest.mark.parametrize("step", [0, 1, 49, 50, 333, 65_535, 65_536, 70_000])
def test_learning_rates_are_those_of_the_schedule(step):
  schedule: Any = optimizers.learning_rate_schedule(
    "wsd", 2e-3, warmup_steps=50, total_steps=80_000, final_fraction=0.05
  )
  rates = metrics_reader.LearningRates(schedule)
  assert rates.at(step) == pytest.approx(float(schedule(step)), rel=1e-6)


def test_a_learning_rate_asks_no_device_that_trains():
  """It would wait for the segment that was dispatched last."""
  rates = metrics_reader.LearningRates(lambda step: 0.5 * step)
  with jax.transfer_guard("disallow"):
    assert [rates.at(step) for step in (0, 3, 65_535)] == [0, 1.5, 32_767.5]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("field", ["loss", "grad_norm"])
def test_a_value_that_is_not_finite_is_named_and_not_recorded(desk, field, bad):
  """Of several, the one of the earliest step."""
  values: Any = np.ones((2, 4), np.float32)
  values[0, 3] = values[1, 2] = bad
  with pytest.raises(NotFiniteError, match="at step 17 on replica 1"):
    desk.book.read(_dispatched(**{field: values}))
  assert not runs.rows(desk.workdir)
  assert not read_rows(desk.workdir / "timing.jsonl")
  assert not desk.told


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


def test_the_bytes_of_a_link_are_recorded_for_each_event(tmp_path, monkeypatch):
  sent = itertools.count(step=70)
  monkeypatch.setenv(link_counter.LINK_VARIABLE, "wan")
  monkeypatch.setattr(link_counter, "sent_bytes", lambda interface: next(sent))
  given = "diloco", runs.programs(CONFIG), tmp_path, TrainingProgress()
  book = MetricsReader(*given)
  assert book.reads_at_once
  book.read(_dispatched())
  book.record_time("checkpoint", 18)
  rows = read_rows(tmp_path / "timing.jsonl")
  assert [row["link_bytes"] for row in rows] == [70, 70]


def test_beside_the_main_process_all_is_checked_and_nothing_shown(capfd):
  programs = runs.programs(CONFIG)
  book = MetricsReader("diloco", programs, None, TrainingProgress())
  assert book.read(_dispatched())
  finite: Any = {"outer_loss": 1.0, "mean_loss": None, "replica_loss": 1.0}
  book.record_evaluation(finite, TrainingProgress(18))
  for name in ("outer_loss", "judge_loss"):
    with pytest.raises(NotFiniteError, match="validation loss"):
      losses = finite | {name: math.nan}
      book.record_evaluation(losses, TrainingProgress(18))
  assert not capfd.readouterr().out


# The summary and the record.


def test_the_record_names_text_evaluations_parts_and_clock(tmp_path):
  clock: Any = SimpleNamespace(description="cluster 1gbit", digest="77")
  programs = runs.programs(CONFIG)
  data = run_text.run_data(CONFIG)

  def recorded(held_out=0, overrides=NO_OVERRIDES, clock=None):
    batches = [np.full((1, 2, 3), held_out, np.int32)]
    given = dataclasses.replace(data, validation=batches)
    made = tmp_path, programs, "train", False
    run_summary.record(CONFIG, given, overrides, clock, *made)
    return json.loads((tmp_path / "run.json").read_text())

  plain = recorded()
  assert plain == recorded()
  digests = plain["held_out_digest"], recorded(1)["held_out_digest"]
  assert digests[0] != digests[1]
  found = plain["corpus_digest"], plain["parameter_count"], plain["method"]
  assert found == (data.digest, programs.parameter_count, "diloco")
  assert plain["chosen_for_device"] and not {"clock", "overrides"} & {*plain}
  assert plain["versions"]["jax"] == jax.__version__
  more = recorded(overrides=Overrides(model=programs.model), clock=clock)
  assert (more["overrides"], more["clock_digest"]) == (["model"], "77")
