import functools
import itertools
import signal

import jax
import numpy as np
import pytest

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.metrics.work_directory import RefusedError
from dilocox_jax.training import trainer
from dilocox_jax.training.states import StopRequestedError, TrainingStoppedError
from tests import runs
from tests.tiers import slow

# fp32, and the flag of who takes part.
EXCHANGE_BYTES = 4 * (256 * 8 + 2 * 8 * 8) + 4
STEP_TOKENS = 2 * runs.BATCH_SIZE * runs.SEQUENCE_LENGTH  # Of two replicas.
train = functools.partial(runs.train, overrides=runs.TINY)
trainer_of = functools.partial(runs.trainer, overrides=runs.TINY)


def test_every_round_and_evaluation_has_a_row(finished):
  rows = runs.rows(finished[0], "round")
  assert [row["step"] for row in rows] == [3, 6, 9, 12, 15, 18, 21]
  assert [row["tokens"] for row in rows] == [
    STEP_TOKENS * row["step"] for row in rows
  ]
  # One-round delay: the first exchange is complete at the end of round two,
  # and all-reducing n bytes between two replicas takes n bytes each.
  sent = [row["sent_bytes"] for row in rows]
  assert sent == [0] + 6 * [EXCHANGE_BYTES]
  totals = [row["total_sent_bytes"] for row in rows]
  assert totals == list(itertools.accumulate(sent))
  assert {row["phase"] for row in rows} == {"rounds"}
  # Cosine from 2e-3 after two steps of warm-up; the row has its last step's.
  angle = np.pi * (3 - 1 - 2) / (21 - 2)
  expected = 2e-3 * (0.95 * 0.5 * (1 + np.cos(angle)) + 0.05)
  np.testing.assert_allclose(rows[0]["learning_rate"], expected, rtol=1e-6)
  for row in rows:
    first, second = row["loss_per_replica"]
    assert first != second
    np.testing.assert_allclose(row["loss"], (first + second) / 2, rtol=1e-12)
    assert all(-1 <= drift["cosine"] <= 1 for drift in row["drift"])
  steps = [[drift["step"] for drift in row["drift"]] for row in rows]
  assert steps == [[], [3], [6], [9], [12], [15], [18]]
  evaluations = runs.rows(finished[0], "evaluation")
  assert [row["step"] for row in evaluations] == [6, 12, 18]
  losses = [row["outer_loss"] for row in evaluations]
  assert sorted(losses, reverse=True) == losses
  final = runs.rows(finished[0])[-1]
  assert final["kind"] == "final" and final["flushed"]
  assert final["num_steps"] == final["step"] == 21
  assert final["total_sent_bytes"] == totals[-1] + EXCHANGE_BYTES


def test_a_segment_is_dispatched_before_the_last_ones_metrics_are_read(
  finished,
):
  calls = finished[1]
  for start in (9, 15):  # Rounds 1 and 2 are new programs; pauses at 6, 12.
    dispatched = calls.index(("_dispatch", start))
    assert dispatched < calls.index(("read", start - 3))
  reads = [start for name, start in calls if name == "read"]
  assert reads == [0, 3, 6, 9, 12, 15, 18]


def test_nothing_crosses_to_the_devices_unasked(tmp_path, monkeypatch):
  """The loop's guard bites: batches as numpy arrays are turned away."""
  monkeypatch.setattr(Replicas, "place", lambda self, tree, axes: tree)
  with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
    train(runs.settings(), tmp_path)


@pytest.mark.parametrize(
  "sync",
  [
    *slow(
      {"method": "diloco"},
      {"method": "streaming_diloco", "num_fragments": 2, "overlap_steps": 1},
      {"method": "eager"},
    ),
    {"method": "allreduce", "sync_interval": None, "steps_per_dispatch": 3},
    # Rounds of 3, 3, 3, 6 and 6 steps.
    {
      "method": "dilocox",
      "sync_interval": 6,
      "first_interval": 3,
      "steps_per_doubling": 9,
      "outer": {"schedule": "cosine"},
    },
    {"method": "diloco", "warm_start_steps": 9, "steps_per_dispatch": 3},
  ],
  ids=lambda sync: "_".join(str(v) for v in sync.values() if v),
)
def test_a_run_stopped_and_continued_equals_one_that_was_not(tmp_path, sync):
  config = runs.settings(**sync)
  train(config, tmp_path / "whole")
  stopped = train(config, tmp_path / "parts", until=9)
  assert stopped.progress.step == 9
  continued = train(config, tmp_path / "parts")
  assert continued.progress.is_finished
  assert runs.metrics_text(tmp_path / "parts") == runs.metrics_text(
    tmp_path / "whole"
  )
  whole = runs.saved(tmp_path / "whole")
  parts = runs.saved(tmp_path / "parts")
  runs.assert_same_bits(parts[0], whole[0])
  assert parts[1] == whole[1]


@pytest.mark.parametrize("stop", [9, 21])
def test_a_run_asked_to_stop_saves_after_the_segment_under_way(
  finished, tmp_path, stop
):
  """Also in its last segment: the end of the run then follows another time."""
  stopped = trainer_of(runs.settings(), tmp_path)
  dispatch = stopped._dispatch

  def dispatch_and_ask(state, segment):
    assert stopped.has_begun == (segment.start > 0)
    if segment.stop == stop:
      stopped.request_stop(signal.SIGTERM)
    return dispatch(state, segment)

  stopped._dispatch = dispatch_and_ask
  line = f"stopped by SIGTERM: saved at step {stop} of 21"
  with pytest.raises(StopRequestedError, match=line):
    runs.run(stopped)
  assert not runs.saved(tmp_path)[1]["position"]["is_finished"]
  assert runs.rows(tmp_path)[-1]["step"] == stop
  assert not runs.rows(tmp_path, "final")
  train(runs.settings(), tmp_path)
  assert runs.metrics_text(tmp_path) == runs.metrics_text(finished[0])
  whole = runs.saved(finished[0])
  parts = runs.saved(tmp_path)
  runs.assert_same_bits(parts[0], whole[0])
  assert parts[1] == whole[1]


def test_how_often_one_looks_does_not_change_the_run(finished, tmp_path):
  config = runs.settings()
  train(config, tmp_path, until=9)
  train(
    runs.settings(
      evaluation={"interval_steps": 0},
      checkpoint={"interval_steps": 3, "keep": 1},
    ),
    tmp_path,
  )
  assert runs.rows(tmp_path, "round") == runs.rows(finished[0], "round")
  runs.assert_same_bits(runs.saved(tmp_path)[0], runs.saved(finished[0])[0])
  names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
  assert names == ["22"]  # The flush counts as one step more.


def test_processes_of_two_runs_do_not_begin(tmp_path, monkeypatch):
  def other(**values):
    raise ValueError(f"process 1 has another {min(values)}")

  monkeypatch.setattr(trainer.processes, "check_equal", other)
  with pytest.raises(RefusedError, match="another config"):
    train(runs.settings(), tmp_path / "x")
  assert not (tmp_path / "x").exists()


def test_a_finished_run_is_left_as_it_is(finished):
  before = runs.files(finished[0])
  train(runs.settings(), finished[0])
  assert "report.md" in before
  assert runs.files(finished[0]) == before


def test_a_run_that_diverges_stops_where_it_was_good(tmp_path):
  """The second step moves all weights by 1e30, and the squares overflow."""
  config = runs.settings(
    method="diloco",
    sync_interval=1,
    inner={"learning_rate": 1e30, "clip_norm": 0.0},
    evaluation={"interval_steps": 0},
    checkpoint={"interval_steps": 1, "keep": 9},
  )
  for _ in range(2):  # The same command again ends in the same place.
    with pytest.raises(TrainingStoppedError) as error:
      train(config, tmp_path)
    message = str(error.value)
    assert "step 2 on replica 0" in message
    assert "inner.learning_rate=1e+30" in message and "\n" not in message
    assert str(tmp_path) in message
    (state, record) = runs.saved(tmp_path)
    assert record["position"]["step"] == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    assert [row["step"] for row in runs.rows(tmp_path, "round")] == [1]


@pytest.mark.parametrize("interval, place", [(2, "a round"), (4, "the flush")])
def test_a_replica_that_diverges_in_its_last_step_is_not_hidden_by_a_reset(
  tmp_path, interval, place
):
  """The second update makes all weights infinite, and no loss ever sees it."""
  config = runs.settings(
    method="diloco",
    sync_interval=interval,
    total_steps=2,
    inner={"learning_rate": 3e38, "weight_decay": 1e6, "warmup_steps": 1},
  )
  line = "pseudo-gradient is not finite at step 2 on replica 0.*no checkpoint"
  with pytest.raises(TrainingStoppedError, match=line):
    train(config, tmp_path)
  assert not runs.rows(tmp_path, "final"), place


@pytest.mark.parametrize(
  ("check", "says"),
  [
    ("is_finite", "a parameter is not finite after step 12"),
    ("copies_are_equal", "copies of the outer state differ after step 12"),
  ],
)
def test_a_state_that_is_not_right_is_not_saved(
  tmp_path, monkeypatch, check, says
):
  right = iter([True, False])
  monkeypatch.setattr(trainer.states, check, lambda state: next(right))
  with pytest.raises(TrainingStoppedError, match=says):
    train(runs.settings(), tmp_path)
  names = [path.name for path in (tmp_path / "checkpoints").iterdir()]
  assert names == ["6"]


def test_a_warm_start_is_trained_counted_and_handed_over(tmp_path):
  config = runs.settings(
    method="diloco",
    warm_start_steps=6,
    steps_per_dispatch=4,
    total_steps=12,
    num_replicas=3,
  )
  train(config, tmp_path, until=6)
  (row,) = runs.rows(tmp_path, "evaluation")
  assert row["step"] == 6 and row["outer_loss"] == row["replica_loss"]
  state, record = runs.saved(tmp_path)
  assert record["phase"] == "rounds"
  for m in range(3):
    own = jax.tree.map(lambda leaf, m=m: leaf[m], state.replica.params)
    runs.assert_same_bits(own, state.fragments[0].params)
  counts = [
    np.asarray(leaf)
    for leaf in jax.tree.leaves(state.replica.optimizer)
    if leaf.dtype == np.int32
  ]
  # The inner optimizer goes on; it does not begin again.
  assert counts and all((count == 6).all() for count in counts)
  train(config, tmp_path)
  rows = runs.rows(tmp_path, "round")
  assert [row["step"] for row in rows] == [4, 6, 9, 12]
  phases = 2 * ["data_parallel"] + 2 * ["rounds"]
  assert [row["phase"] for row in rows] == phases
  a_step = 3 * STEP_TOKENS // 2
  assert [row["tokens"] for row in rows] == [a_step * r["step"] for r in rows]
  # A ring of three passes 4 / 3 of the values and of the flag on.
  sent = [row["sent_bytes"] for row in rows]
  ring = -(-EXCHANGE_BYTES * 4 // 3)
  assert sent == [ring * each for each in (4, 2, 1, 1)]
  (final,) = runs.rows(tmp_path, "final")
  assert final["total_sent_bytes"] == sum(sent)  # Nothing was left to flush.
  assert final["outer_loss"] == final["replica_loss"]
  # The mean of three equal values is rounded.
  assert final["mean_loss"] == pytest.approx(final["outer_loss"], rel=1e-6)
