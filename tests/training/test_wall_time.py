"""What the rows of whole runs say of time, with steps that take a known time.

A step sleeps, so it takes at least that long on any machine, however busy.
"""

import contextlib
import dataclasses
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.mailbox_protocol.store import Store
from dilocox_jax.metrics.lines import read_rows
from dilocox_jax.models.loss import LossModel
from dilocox_jax.rounds.rounds import Rounds
from dilocox_jax.training.mailbox_replica import MailboxAddress
from dilocox_jax.training.overrides import Overrides
from dilocox_jax.training.trainer import Trainer
from tests import runs
from tests.mailbox.apart import SECRET

STEP_S = 0.01  # Of one replica; two are stacked, and take turns.
ROUND_S = 2 * 3 * STEP_S


def _slow_loss(params, tokens):
  def sleep(tokens):
    time.sleep(STEP_S)
    return np.zeros(tokens.shape[:1], np.float32)

  size = jax.ShapeDtypeStruct(tokens.shape[:1], np.float32)
  zeros = jax.pure_callback(sleep, size, tokens, vmap_method="sequential")
  return TINY.loss(params, tokens) + zeros.sum()


TINY: Any = runs.TINY.model
SLOW = Overrides(model=LossModel(TINY.init, _slow_loss))


@contextlib.contextmanager
def timed():
  """Measures how long a run trains."""
  spent_s = []
  train = Trainer._train_to_the_end

  def spy(self, state):
    start_s = time.perf_counter()
    try:
      train(self, state)
    finally:
      spent_s.append(time.perf_counter() - start_s)

  with mock.patch.object(Trainer, "_train_to_the_end", spy):
    yield spent_s


def timings(workdir):
  return read_rows(workdir / "timing.jsonl")


def trained(config, workdir, until=None):
  """Trains to a step; returns how long that took."""
  with timed() as spent_s:
    runs.train(config, workdir, until=until, overrides=SLOW)
  return spent_s[0]


@pytest.mark.parametrize(
  "sync",
  [
    {"method": "diloco"},
    {"method": "diloco", "warm_start_steps": 3},
    {"method": "dilocox"},
  ],
)
def test_each_round_has_its_own_time_and_all_rows_add_up(tmp_path, sync):
  """Whether rounds are read late, or others come between them."""
  config = runs.settings(**sync, total_steps=15)
  spent_s = trained(config, tmp_path)
  rows = timings(tmp_path)
  # After a warm start, the first round has two rows: its last step has its own.
  seconds = {
    row["step"]: row["wall_s"] for row in rows if row["event"] == "round"
  }
  assert {3, 6, 9, 12, 15} <= set(seconds)
  rounds = [
    sum(seconds.get(step, 0.0) for step in (end - 2, end - 1, end))
    for end in (3, 6, 9, 12, 15)
  ]
  assert sum(rounds) > 0.9 * len(rounds) * ROUND_S
  # A busy machine may notice the end of a round late, and then the next round
  # seems shorter than it was.
  assert min(rounds) > 0.5 * ROUND_S
  assert sum(row["wall_s"] for row in rows) == pytest.approx(spent_s, abs=0.5)
  # Each row has what it names alone: nothing else waits for ten steps.
  events = [(row["event"], row["step"]) for row in rows]
  others = [each for each in events if each[0] not in ("compile", "round")]
  pauses = ("evaluation", "checkpoint")
  expected = [(event, step) for step in (6, 12) for event in pauses]
  expected += [("flush", 15), ("evaluation", 15), ("checkpoint", 15)]
  assert others == expected


def test_no_program_is_compiled_while_another_runs(tmp_path, monkeypatch):
  """So the time of a first round can be told from that of compiling."""

  def busy_loss(params, tokens):
    eye = jnp.eye(200)
    result = jax.lax.fori_loop(0, 8, lambda _, x: jnp.tanh(x @ eye), eye)
    return TINY.loss(params, tokens) + 0.0 * result.sum()

  run = Rounds._run_window
  was_ready = []

  def spy(self, window, kind, given, fragments):
    was_ready.append(all(x.is_ready() for x in jax.tree.leaves(given)))
    return run(self, window, kind, given, fragments)

  monkeypatch.setattr(Rounds, "_run_window", spy)
  config = runs.settings(method="diloco", total_steps=3)
  model = LossModel(TINY.init, busy_loss)
  runs.train(config, tmp_path, overrides=Overrides(model=model))
  assert len(was_ready) > 1 and all(was_ready)


def test_a_run_that_goes_on_counts_what_it_kept(tmp_path):
  config = runs.settings(method="diloco", total_steps=15)
  trained(config, tmp_path, until=12)
  before = timings(tmp_path)
  spent_s = trained(config, tmp_path)
  rows = timings(tmp_path)
  kept = [row for row in before if row["step"] <= 12]
  assert rows[: len(kept)] == kept
  later = sum(row["wall_s"] for row in rows[len(kept) :])
  assert later == pytest.approx(spent_s, abs=0.5)
  rounds = [row["wall_s"] for row in rows if row["event"] == "round"]
  assert len(rounds) == 5 and min(rounds) > 0.5 * ROUND_S


def test_so_has_each_round_of_a_replica_that_meets_others_in_a_store(tmp_path):
  address = MailboxAddress(Store("memory:///"), "oslo", SECRET)
  exchange = {"collective": "mailbox"}
  config = runs.settings(method="diloco", total_steps=12, exchange=exchange)
  meet = dataclasses.replace(config.mailbox, grace_s=0.2)
  config = dataclasses.replace(config, mailbox=meet)
  with timed() as spent_s:
    Trainer(config, tmp_path, overrides=SLOW, address=address).run()
  rows = timings(tmp_path)
  total_s = sum(row["wall_s"] for row in rows)
  assert total_s == pytest.approx(spent_s[0], abs=0.5)
  rounds = [row for row in rows if row["event"] == "round"]
  assert [row["step"] for row in rounds] == [3, 6, 9, 12]
  # One replica's steps, and the waits for the other.
  exposed_s = sum(row["exposed_s"] for row in rounds)
  rounds_s = sum(row["wall_s"] for row in rounds)
  assert rounds_s > 0.9 * (3 * STEP_S * len(rounds) + exposed_s)
