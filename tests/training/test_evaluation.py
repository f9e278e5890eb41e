import json
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax import report
from dilocox_jax.config import from_mapping
from dilocox_jax.outer.drift import Drift
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule
from dilocox_jax.training import evaluation, states
from tests import runs


@pytest.fixture(scope="module", name="batches")
def batches_fixture():
  shape = (2, 2, runs.SEQUENCE_LENGTH + 1)
  return np.random.default_rng(3).integers(0, 256, shape, np.int32)


def _noisy(tree, seed):
  """Every leaf moved by noise of its own."""
  leaves, structure = jax.tree.flatten(tree)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  return jax.tree.unflatten(
    structure,
    [
      leaf + 0.1 * jax.random.normal(key, leaf.shape)
      for leaf, key in zip(leaves, keys, strict=True)
    ],
  )


def _state(programs, phase="rounds") -> Any:
  params = jax.jit(programs.model.init)(jax.random.key(1))
  return states.fresh(programs, phase, params)


def _loss(programs, params, batches):
  """Mean over the batches, one call each."""
  loss = jax.jit(lambda p, batch: programs.model.loss(p, batch))
  return np.mean([float(loss(params, batch)) for batch in batches])


def _mean(tree):
  return jax.tree.map(lambda leaf: leaf.mean(axis=0), tree)


@pytest.mark.parametrize(
  ("method", "layout"),
  [("dilocox", "stacked"), ("dilocox", "mesh"), ("eager", "stacked")],
)
def test_outer_mean_and_replica_are_three_views_of_a_state(
  batches, method, layout
):
  config = runs.settings(method=method, layout=layout, num_replicas=3)
  programs = runs.programs(config, runs.TINY)
  state = _state(programs)
  own = _noisy(state.replica.params, seed=2)
  outer = state.fragments[0].params
  if method == "eager":  # Every replica has outer parameters of its own.
    outer = _noisy(outer, seed=4)
    fragment = state.fragments[0]._replace(params=outer)
    state = state._replace(fragments=(fragment,))
  state = state._replace(replica=state.replica._replace(params=own))
  seen, _ = evaluation.losses(programs, state, [batches])
  own, outer = jax.device_get((own, outer))
  views = {
    "outer_loss": _mean(outer) if method == "eager" else outer,
    "mean_loss": _mean(own),
    "replica_loss": jax.tree.map(lambda leaf: leaf[0], own),
  }
  assert list(seen) == list(views)
  assert len(set(seen.values())) == 3
  for name, params in views.items():
    expected = _loss(programs, params, batches)
    np.testing.assert_allclose(seen[name], expected, rtol=1e-5)


@pytest.mark.parametrize("method", ["dilocox", "eager"])
def test_between_processes_no_parameters_are_sent_uncounted(
  batches, method, monkeypatch
):
  settings = runs.settings(method=method, layout="mesh", num_replicas=2)
  programs = runs.programs(settings, runs.TINY)
  state = _state(programs)
  own = _noisy(state.replica.params, seed=2)
  state = state._replace(replica=state.replica._replace(params=own))
  alone, sent_bytes = evaluation.losses(programs, state, [batches])
  assert sent_bytes == 0
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(evaluation, "arrays_to_host", jax.device_get)
  seen, sent_bytes = evaluation.losses(programs, state, [batches])
  assert seen["mean_loss"] is None
  for view in ("outer_loss", "replica_loss"):
    assert seen[view] == pytest.approx(alone[view], rel=1e-6)
  placed = programs.rounds.replicas.place(batches, None)
  compiled: Any = programs.evaluate_each.lower(own, placed).compile().as_text()
  for collective in ("all-reduce", "all-gather", "permute", "all-to-all"):
    assert collective not in compiled
  # Eager replicas have outer parameters of their own, and a mean is summed up.
  counted = 4 * programs.parameter_count if method == "eager" else 0
  assert sent_bytes == counted


def test_an_average_is_no_view_of_the_replicas(batches):
  config = runs.settings(
    method="allreduce", sync_interval=None, outer={"average_power": 2.0}
  )
  programs = runs.programs(config, runs.TINY)
  state = _state(programs, "data_parallel")
  average = state.optimizer.average
  moved = state._replace(params=_noisy(state.params, seed=2))
  seen, _ = evaluation.losses(programs, moved, [batches])
  expected = _loss(programs, moved.params, batches)
  np.testing.assert_allclose(seen["replica_loss"], expected, rtol=1e-5)
  assert seen["mean_loss"] == seen["replica_loss"] != seen["outer_loss"]
  expected = _loss(programs, average, batches)
  np.testing.assert_allclose(seen["outer_loss"], expected, rtol=1e-5)


def test_every_predicted_token_of_a_whole_pass_has_one_weight(batches):
  programs = runs.programs(runs.settings(), runs.TINY)
  params = _noisy(programs.model.init(jax.random.key(1)), seed=5)
  state: Any = states.fresh(programs, "data_parallel", params)
  parts = [batches, batches[:1, :1, :4]]
  tokens = [row for part in parts for batch in part for row in batch]
  losses = [
    float(programs.model.loss(params, jnp.asarray(row[None]))) for row in tokens
  ]
  expected = np.average(losses, weights=[len(row) - 1 for row in tokens])
  seen, _ = evaluation.losses(programs, state, [batches], parts)
  assert seen["judge_loss"] == pytest.approx(expected, rel=1e-6)
  assert seen["judge_loss"] != pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.parametrize("where", ["outer", "own"])
def test_one_bad_value_anywhere_is_found(where):
  state = {"outer": jnp.ones(3), "count": jnp.int32(1), "own": jnp.ones(3)}
  assert states.is_finite(cast(Any, state))
  state[where] = state[where].at[-1].set(np.nan)
  assert not states.is_finite(cast(Any, state))


def test_drifts_find_their_events():
  """Two fragments, a delay of one step, the second round."""
  schedule = SyncSchedule(4, 2, 1)
  windows = tuple(schedule.windows(4, 8))
  arrivals = [window.applied for window in windows if window.applied]
  assert len(arrivals) == 2
  segment = Segment("rounds", 14, 4, windows, schedule_start=10)

  def drift(own, apart, mean, observed):
    return Drift(np.asarray(own), np.asarray(apart), np.asarray(mean), observed)

  one = drift([9.0, 9.0], [4.0, 4.0], 9.0, observed={})
  gram = np.diag([3.0, 1.0, 0.0])[None]  # [layers, ...]
  low_rank = {"w": gram, "not_sent": np.zeros((1, 3, 3)), "seen": np.ones(2)}
  two = drift([np.nan, 1.0], [25.0, 25.0], 36.0, observed=low_rank)
  rows = evaluation.drift_rows(segment, [one, two], energy_share=0.7)
  # Sent after steps 4 and 6 of the schedule, which began at step 10.
  assert [(row["fragment"], row["step"]) for row in rows] == [(0, 14), (1, 16)]
  assert [row["cosine"] for row in rows] == [1.0, None]
  assert [row["disagreement"] for row in rows] == [2.0, 5.0]
  assert [row["pseudo_gradient_norm"] for row in rows] == [3.0, 6.0]
  assert "rank" not in rows[0] and rows[1]["observed"] == {"seen": [1, 1]}
  assert rows[1]["rank"] == 2
  assert rows[1]["energy_rank"] == 1


def _zero_drift(is_left_out=None):
  """Norms of (3, 0), (0, 0) and (0, 3): the mean is (1, 1)."""
  return Drift(
    own_squared=np.array([9.0, 0.0, 9.0]),
    apart_squared=np.array([5.0, 2.0, 5.0]),
    mean_squared=np.array(2.0),
    observed={},
    is_left_out=is_left_out,
  )


def _one_exchange():
  windows = tuple(SyncSchedule(4).windows(4, 8))
  return Segment("rounds", 4, 4, windows, schedule_start=0)


@pytest.mark.parametrize("is_filtered", [False, True])
def test_a_replica_without_progress_is_in_the_mean(is_filtered, caplog):
  drift = _zero_drift(np.zeros(3, bool) if is_filtered else None)
  evaluation.check_drifts([drift], [8])
  assert not caplog.records
  (row,) = evaluation.drift_rows(_one_exchange(), [drift], energy_share=0.7)
  assert row["cosine"] == pytest.approx(0.0)
  assert row["disagreement"] == pytest.approx(2.0)


def test_a_replica_that_the_filter_leaves_out_is_named_and_not_counted(caplog):
  drift = _zero_drift(np.array([False, True, False]))._replace(
    mean_squared=np.array(4.5), apart_squared=np.array([4.5, 4.5, 4.5])
  )
  evaluation.check_drifts([drift], [8])
  assert caplog.text.count("step 8: replica 1 is left out") == 1
  (row,) = evaluation.drift_rows(_one_exchange(), [drift], energy_share=0.7)
  assert row["cosine"] == pytest.approx(0.0)
  assert row["disagreement"] == pytest.approx(4.5**0.5)


def test_a_run_does_not_call_a_replica_without_steps_left_out(tmp_path, caplog):
  """Fragment 1 is first sent after step 2, before replica 1 takes a step."""
  config = runs.settings(
    method="streaming_diloco",
    sync_interval=4,
    num_fragments=2,
    overlap_steps=0,
    fragment_order="sliced",
    total_steps=4,
  )
  values = config.to_mapping() | {"membership": {"inner_steps": "4,1"}}
  runs.train(from_mapping(values), tmp_path, overrides=runs.TINY)
  row, *_ = runs.rows(tmp_path, "round")
  assert [drift["step"] for drift in row["drift"]] == [2, 4]
  assert "left out" not in caplog.text


def test_the_last_losses_are_of_the_last_state_and_of_held_out_text(tmp_path):
  """What judges is read once, and both are read whole."""
  lines = (json.dumps({"text": f"some text {n}"}) for n in range(300))
  (tmp_path / "train.jsonl").write_text("\n".join(lines))
  data = {"source": "text_files", "glob": f"{tmp_path}/train.jsonl"}
  shares = {"validation_fraction": 0.5, "judge_fraction": 0.5}
  config = runs.settings(
    method="diloco",
    total_steps=9,
    data=data | shares,
    evaluation={"interval_steps": 6, "num_sequences": 0},
  )
  text = runs.train(config, tmp_path / "run", overrides=runs.TINY).data.text
  assert text and text.judge is not None
  (row,) = runs.rows(tmp_path / "run", "evaluation")
  assert "judge_loss" not in row
  state, _ = runs.saved(tmp_path / "run")
  loss = jax.jit(runs.programs(config, runs.TINY).model.loss)
  length = runs.SEQUENCE_LENGTH
  params = state.fragments[0].params
  (row,) = runs.rows(tmp_path / "run", "final")
  for name, tokens in (
    ("outer_loss", text.validation),
    ("judge_loss", text.judge),
  ):
    # One sequence at a time, of at most L predicted tokens.
    cuts = range(0, len(tokens) - 1, length)
    parts = [tokens[None, cut : cut + length + 1] for cut in cuts]
    losses = [float(loss(params, jnp.asarray(x, jnp.int32))) for x in parts]
    expected = np.average(losses, weights=[part.size - 1 for part in parts])
    assert row[name] == pytest.approx(expected, rel=1e-5)
  page = report.write_report(tmp_path / "run").read_text()
  assert f"{row['judge_loss']:.4f}" in page
