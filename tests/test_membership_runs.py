"""Runs in which replicas are away, or slow: what is trained, counted, saved."""

import jax
import numpy as np
import pytest

from dilocox_jax.config import from_mapping, to_plan
from dilocox_jax.training import run_text
from dilocox_jax.training.checkpoint import RefusedError
from tests import runs

APART = {"absences": "1:1-2;0:4", "inner_steps": "3,2"}
METHODS = ["diloco", pytest.param("dilocox", marks=pytest.mark.slow)]


def apart(membership, **changes):
  values = runs.settings(total_steps=18, **changes).to_mapping()
  return from_mapping(values | {"membership": membership})


@pytest.mark.parametrize("method", METHODS)
def test_replicas_that_come_and_go_are_counted_and_continue(tmp_path, method):
  config = apart(APART, method=method)
  whole, cut = tmp_path / "whole", tmp_path / "cut"
  runs.train(config, whole)
  runs.train(config, cut, until=12)  # Saved while replica 1 is back.
  runs.train(config, cut)
  assert runs.metrics_text(cut) == runs.metrics_text(whole)

  rows = runs.rows(whole, "round")
  a_step = runs.BATCH_SIZE * runs.SEQUENCE_LENGTH
  tokens = np.diff([0, *(row["tokens"] for row in rows)]) / a_step
  assert tokens.tolist() == [5, 3, 3, 5, 2, 5]
  away = [[x is None for x in row["loss_per_replica"]] for row in rows]
  both, first, second = [False, False], [False, True], [True, False]
  assert away == [both, first, first, both, second, both]
  first_loss, second_loss = rows[0]["loss_per_replica"]
  mean = (3 * first_loss + 2 * second_loss) / 5
  assert rows[0]["loss"] == pytest.approx(mean)

  # Alone, a replica sends nothing; one that comes back is sent the state.
  outer = runs.saved(whole)[0].fragments[0].params
  params = sum(x.size for x in jax.tree.leaves(outer))
  all_reduce = 4 * (params + 1)  # M = 2: 2 (M - 1) / M of it.
  optimizer = 4 * (2 * params + 2)  # AdamW's moments, two counters.
  copy = 4 * params + optimizer
  sent = [row["sent_bytes"] for row in rows]
  in_time = [all_reduce, 0, 0, all_reduce + copy, 0, all_reduce + copy]
  late = [0, 0, 0, all_reduce + copy, 0, all_reduce + copy]
  assert sent == (in_time if method == "diloco" else late)


@pytest.mark.slow
def test_a_replica_away_for_three_rounds_is_drawn_from_the_seed(tmp_path):
  config = apart({"absence_rate": 0.5})
  runs.train(config, tmp_path)
  rows = runs.rows(tmp_path, "round")
  membership = to_plan.run_plan(config).membership
  assert membership
  for number, row in enumerate(rows):
    here = [x is not None for x in row["loss_per_replica"]]
    assert here == membership.present(number).tolist()
  assert len({tuple(membership.present(r)) for r in range(6)}) > 1


def test_the_flush_of_a_replica_that_is_away_stops_no_run(tmp_path):
  runs.train(apart({"absences": "1:5-9"}), tmp_path)
  assert runs.rows(tmp_path, "final")[-1]["step"] == 18


def final_loss(workdir, seed, steps, membership):
  values = runs.settings(
    total_steps=steps, num_replicas=4, method="diloco", sync_interval=8
  ).to_mapping()
  config = from_mapping(values | {"seed": seed, "membership": membership})
  runs.train(config, workdir)
  return runs.rows(workdir, "final")[-1]["outer_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_losses_with_one_of_four_replicas_away_or_slow(tmp_path, seed):
  plain, away, slow, fewer = (
    final_loss(tmp_path / name, seed, steps, membership)
    for name, steps, membership in (
      ("plain", 192, {}),
      ("away", 192, {"absences": "2:6-8"}),
      ("slow", 192, {"inner_steps": "8,8,8,4"}),
      ("as_many_tokens_as_slow", 168, {}),
    )
  )
  print(f"plain {plain}, away {away}, slow {slow}, fewer steps {fewer}")
  assert plain < 0.9 * np.log(256)  # It has learned something.
  assert away == pytest.approx(plain, rel=0.01)
  assert plain < slow < fewer  # It costs less than the tokens that it lacks.


def converging(seed, membership):
  """125 rounds of four replicas on a chain of 64 tokens."""
  values = runs.settings(
    total_steps=1000,
    num_replicas=4,
    method="diloco",
    sync_interval=8,
    model={"vocab_size": 64},
    inner={"learning_rate": 0.005, "warmup_steps": 50},
    data={"batch_size": 4, "sequence_length": 64},
    evaluation={"num_sequences": 256, "interval_steps": 0},
    checkpoint={"interval_steps": 1000},
  ).to_mapping()
  return from_mapping(values | {"seed": seed, "membership": membership})


def floor(config):
  """Loss of the chain itself on the windows of the evaluations (nats).

  They are a sample of 16,384 tokens, so it differs from the chain's entropy.
  """
  corpus = run_text.corpus(config)
  counts = np.zeros((corpus.vocab_size, corpus.vocab_size))
  np.add.at(counts, (corpus.train[:-1], corpus.train[1:]), 1)
  chances = counts / counts.sum(axis=1, keepdims=True)
  windows = np.concatenate(
    [np.reshape(x, (-1, 65)) for x in run_text.held_out(config, corpus)]
  )
  return -np.log(chances[windows[:, :-1], windows[:, 1:]]).mean()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_slow_or_absent_replica_costs_a_converged_run_less_than_1_percent(
  tmp_path, seed
):
  """At equal rounds, so the slow run has seen an eighth fewer tokens."""
  losses = {}
  for name, membership in (
    ("plain", {}),
    ("away", {"absences": "2:6-8"}),
    ("slow", {"inner_steps": "8,8,8,4"}),
  ):
    runs.train(converging(seed, membership), tmp_path / name)
    losses[name] = runs.rows(tmp_path / name, "final")[-1]["outer_loss"]
  lowest = floor(converging(seed, {}))
  print(f"seed {seed}: {losses}, lowest {lowest}")
  plain = losses.pop("plain")
  assert plain < 1.015 * lowest  # There is little left to learn.
  assert list(losses.values()) == pytest.approx([plain, plain], rel=0.01)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_goes_on_with_more_replicas_and_with_fewer(tmp_path, method):
  """Two for three rounds, three for two, then two again."""
  two, three = (
    runs.settings(
      num_replicas=count, method=method, checkpoint={"interval_steps": 3}
    )
    for count in (2, 3)
  )
  runs.train(two, tmp_path, until=9)
  runs.train(three, tmp_path, until=15)
  runs.train(two, tmp_path)
  rows = runs.rows(tmp_path, "round")
  counts = [len(row["loss_per_replica"]) for row in rows]
  assert counts == [2, 2, 2, 3, 3, 2, 2]
  a_step = runs.BATCH_SIZE * runs.SEQUENCE_LENGTH
  assert rows[-1]["tokens"] == (15 * 2 + 6 * 3) * a_step
  losses = [row["loss"] for row in rows]
  assert np.isfinite(losses).all() and losses[-1] < losses[0]
  # One that is new is sent the state, once.
  outer = runs.saved(tmp_path)[0].fragments[0].params
  params = sum(x.size for x in jax.tree.leaves(outer))
  sent = [row["sent_bytes"] for row in rows]
  assert sent[3] - sent[4] == 4 * (3 * params + 2)
  assert sent[5] == sent[6] == sent[2]


@pytest.mark.parametrize(
  ("changes", "hint"),
  [
    ({"method": "allreduce", "sync_interval": None}, "sync.method='allreduce'"),
    pytest.param(
      {"method": "eager"}, "sync.rule='eager'", marks=pytest.mark.slow
    ),
  ],
)
def test_replicas_that_cannot_change_in_number_are_refused(
  tmp_path, changes, hint
):
  runs.train(runs.settings(**changes, steps_per_dispatch=3), tmp_path, until=9)
  config = runs.settings(**changes, steps_per_dispatch=3, num_replicas=3)
  with pytest.raises(RefusedError, match=hint) as error:
    runs.train(config, tmp_path)
  assert "mesh.num_replicas: 2 -> 3" in str(error.value)
