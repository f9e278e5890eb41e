"""Whole runs whose replicas meet in a store, each in a thread of its own."""

import collections
import dataclasses
import functools
import logging
import re
import signal
import socket
import threading
from concurrent.futures import Future
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.mailbox_protocol import client
from dilocox_jax.mailbox_protocol.store import Store
from dilocox_jax.metrics.lines import read_rows
from dilocox_jax.metrics.run_logs import as_log
from dilocox_jax.models.loss import LossModel
from dilocox_jax.training import build, checkpoint, mailbox_replica, states
from dilocox_jax.training.mailbox_replica import MailboxAddress
from dilocox_jax.training.overrides import Overrides
from dilocox_jax.training.states import TrainingStoppedError
from dilocox_jax.training.trainer import Trainer
from dilocox_jax.training.watching import Watching
from tests import runs
from tests.api.conftest import no_pictures  # noqa: F401
from tests.mailbox.apart import SECRET, in_threads
from tests.tiers import slow

NAMES = ("oslo", "rome")
SAVING = threading.Lock()
MET = {
  "diloco": {"method": "diloco"},
  "overlap_loco": {
    "method": "overlap_loco",
    "num_fragments": 2,
    "exchange": {"codec": "int(bits=1)", "feedback": 1.0},
  },
  "dilocox": {
    "method": "dilocox",
    "exchange": {"codec": "low_rank(rank=2)+int(bits=4)", "feedback": 1.0},
  },
  # Rounds of 3, 3, 3, 6 and 6 steps.
  "growing": {
    "method": "overlap_loco",
    "sync_interval": 6,
    "num_fragments": 2,
    "first_interval": 3,
    "steps_per_doubling": 9,
    "exchange": {"codec": "int(bits=1)", "feedback": 1.0},
  },
}


def settings(method, **meet):
  config = runs.settings(**MET[method])
  changes = {"collective": "mailbox", "max_norm_ratio": 100.0}
  exchange = dataclasses.replace(config.exchange, **changes)
  # Messages keep their full weight, as they do in one runtime.
  rules = dataclasses.replace(config.mailbox, full_weight_ratio=1e6, **meet)
  return dataclasses.replace(config, exchange=exchange, mailbox=rules)


class Group:
  """Replicas of one run, with their directories and their store."""

  def __init__(self, folder, config):
    self.folder = folder
    self.config = config
    self.store = Store("memory:///")
    self.logged = collections.defaultdict(list)  # Rows by name of the replica.

  def train(self, name, before=None, config=None):
    """Trains a replica; calls `before` with the trainer at every segment."""
    address = MailboxAddress(self.store, name, SECRET)
    trainer = Trainer(
      config or self.config,
      self.folder / name,
      overrides=runs.TINY,
      address=address,
      watching=Watching(log=as_log(self.logged[name].append)),
    )
    dispatch = trainer._dispatch

    def watched(state, segment):
      if before:
        before(trainer, segment)
      return dispatch(state, segment)

    save = trainer._save

    def alone(state):  # Orbax numbers the saves of a process, not of a run.
      with SAVING:
        save(state)
        trainer._checkpoints.wait()

    trainer._dispatch = watched
    trainer._save = alone
    trainer.run()

  def params(self, name):
    state, _ = runs.saved(self.folder / name)
    return [fragment.params for fragment in state.fragments]

  def members(self, name):
    rows = read_rows(self.folder / name / "mailbox.jsonl")
    return {row["event"]: row["members"] for row in rows}

  def assert_all_equal(self):
    runs.assert_same_bits(self.params("oslo"), self.params("rome"))


@pytest.fixture(scope="module", name="whole")
def whole_fixture(tmp_path_factory):
  """A run that nobody disturbed, by method."""

  @functools.cache
  def whole(method):
    group = Group(tmp_path_factory.mktemp(method), settings(method))
    in_threads(lambda n: group.train(NAMES[n]), 2, group.store)
    return group

  return whole


@pytest.mark.parametrize(
  "method", ["overlap_loco", "growing", *slow("diloco", "dilocox")]
)
def test_apart_is_as_together(whole, method, tmp_path):
  met = whole(method)
  met.assert_all_equal()
  way = "all_reduce" if method == "diloco" else "all_gather"
  exchange = dataclasses.replace(met.config.exchange, collective=way)
  config = runs.settings(**MET[method])
  config = dataclasses.replace(config, exchange=exchange)
  runs.train(config, tmp_path, overrides=runs.TINY)
  (final,) = runs.rows(tmp_path, "final")
  for name in NAMES:
    (own,) = runs.rows(met.folder / name, "final")
    assert own["outer_loss"] == pytest.approx(final["outer_loss"], rel=1e-6)


def test_the_log_of_a_replica_gets_the_events_of_the_mailbox(whole):
  met = whole("overlap_loco")
  for name in NAMES:
    events = [row for row in met.logged[name] if row["kind"] == "mailbox"]
    assert events == read_rows(met.folder / name / "mailbox.jsonl")
    assert events and events[-1]["members"] == sorted(NAMES)


@pytest.mark.parametrize("method", ["overlap_loco", *slow("growing")])
def test_who_is_killed_goes_on_and_who_differs_is_refused(
  whole, method, tmp_path, caplog
):
  caplog.set_level(logging.INFO)
  whole = whole(method)
  met = Group(tmp_path, settings(method))
  inner = dataclasses.replace(met.config.inner, learning_rate=0.5)

  def come(trainer, segment):
    if segment.start == 6:
      with pytest.raises(checkpoint.RefusedError) as refused:
        met.train("bern", config=dataclasses.replace(met.config, inner=inner))
      line = str(refused.value)
      assert "config.inner.learning_rate is 0.5" in line and "\n" not in line

  def die(trainer, segment):
    if segment.start >= 15:
      raise runs.Killed

  def one(name):
    if name == "rome":
      with pytest.raises(runs.Killed):
        met.train(name, die)
    met.train(name, come if name == "oslo" else None)

  in_threads(lambda n: one(NAMES[n]), 2, met.store)
  assert re.search(r"2 of 2 here, [1-9]\d* requests an event", caplog.text)
  assert met.members("oslo") == met.members("rome")
  assert whole.members("oslo").keys() == met.members("rome").keys()
  met.assert_all_equal()
  runs.assert_same_bits(whole.params("rome"), met.params("rome"))
  for name in NAMES:
    assert runs.metrics_text(whole.folder / name) == runs.metrics_text(
      tmp_path / name
    )
  met.store = Store("memory:///")  # The place of another run.
  met.config = dataclasses.replace(met.config, seed=1)
  with pytest.raises(checkpoint.RefusedError, match="seed"):
    met.train("oslo")


def over_replicas(optimizer):
  """An optimizer whose updates are a mean over the replicas."""

  def update(updates, state, params=None):
    updates, state = optimizer.update(updates, state, params)
    return jax.lax.pmean(updates, "replica"), state

  return optax.GradientTransformation(optimizer.init, update)


MODEL: Any = runs.TINY.model


def loss_over_replicas(params, tokens):
  return jax.lax.pmean(MODEL.loss(params, tokens), "replica")


def test_a_store_that_is_too_small_is_refused_before_it_is_touched(tmp_path):
  group = Group(tmp_path, settings("diloco", store_bytes=10**6))
  with pytest.raises(
    ValueError, match="store_bytes=1000000 is too low"
  ) as error:
    group.train("oslo")
  assert "\n" not in str(error.value)
  assert not group.store.requests


@pytest.mark.parametrize(
  ("part", "what"),
  [
    ({"model": LossModel(MODEL.init, loss_over_replicas)}, "inner"),
    ({"inner_optimizer": over_replicas(optax.sgd(0.1))}, "inner"),
    ({"outer_optimizer": over_replicas(optax.sgd(0.7))}, "outer"),
  ],
  ids=["loss", "inner optimizer", "outer optimizer"],
)
def test_a_step_that_needs_the_others_is_refused_before_the_store_is_touched(
  part, what, tmp_path
):
  tokens = np.arange(4000) % 61
  place = tmp_path / "store"
  with pytest.raises(ValueError, match=f"the {what} step .* axis 'r") as error:
    dx.train(
      **{"model": MODEL} | part,
      data=(tokens, tokens),
      config=settings("diloco").to_mapping() | {"data": {"batch_size": 2}},
      workdir=tmp_path / "run",
      mailbox=MailboxAddress(place, "oslo", SECRET),
    )
  assert "\n" not in str(error.value)
  assert not place.exists() and not (tmp_path / "run").exists()


def test_an_exchange_by_a_store_is_not_passed_in(tmp_path):
  exchange = dx.mailbox(Store("memory:///"), name="oslo", secret=SECRET)
  tokens = np.arange(4000) % 61
  with pytest.raises(ValueError, match="give mailbox= in its place"):
    dx.train(
      data=(tokens, tokens),
      exchange=exchange,  # pyright: ignore
      workdir=tmp_path,
    )


def divided(layout, shards):
  """A run of one replica that meets others in a store, on so many devices."""
  config = settings("diloco")
  mesh = {"num_replicas": 1, "layout": layout, "num_data_shards": shards}
  return dataclasses.replace(
    config, total_steps=6, mesh=dataclasses.replace(config.mesh, **mesh)
  )


@pytest.mark.parametrize("what", ["", "inner", "outer"])
def test_a_replica_on_several_devices_is_traced_without_the_others(what):
  config = divided("mesh", 2)
  optimizer = over_replicas(optax.sgd(0.1))
  overrides = Overrides(
    inner_optimizer=optimizer if what == "inner" else None,
    outer_optimizer=optimizer if what == "outer" else None,
    exchange=mailbox_replica.mailbox_exchange(config),
  )
  batch = jax.ShapeDtypeStruct((2, runs.SEQUENCE_LENGTH + 1), np.int32)
  programs = build.programs(config, overrides)
  if not what:
    programs.rounds.check_alone(*states.shapes_of(programs), batch)
    return
  with pytest.raises(ValueError, match=f"the {what} step .* share no axis"):
    programs.rounds.check_alone(*states.shapes_of(programs), batch)


@pytest.mark.slow
def test_a_replica_on_several_devices_meets_as_one_on_a_single_device(tmp_path):
  ends = []
  for layout, shards in (("stacked", 1), ("mesh", 2)):
    address = MailboxAddress(Store("memory:///"), "oslo", SECRET)
    config = divided(layout, shards)
    workdir = tmp_path / layout
    Trainer(config, workdir, address=address).run()
    (final,) = runs.rows(workdir, "final")
    ends.append(final["outer_loss"])
  assert ends[1] == pytest.approx(ends[0], rel=1e-4)


def test_a_server_that_never_answers_holds_up_no_end(
  tmp_path, monkeypatch, caplog
):
  at_exit = mock.Mock()
  met = Group(tmp_path, settings("diloco", grace_s=0.2))
  monkeypatch.setattr(client, "atexit", at_exit)
  answers = met.store._objects
  with socket.create_server(("127.0.0.1", 0)) as server:
    place = f"http://127.0.0.1:{server.getsockname()[1]}"
    silent = Store("s3://bucket/run", skip_signature=True, endpoint=place)

    def stop(trainer, segment):
      if segment.start == 9:
        met.store._objects = silent._objects
        trainer.request_stop(signal.SIGTERM)

    line = "gave up on the store.* the checkpoint of step 6 is kept"
    with pytest.raises(TrainingStoppedError, match=line):
      met.train("oslo", stop)
    waiting = [x for x in threading.enumerate() if x.name.endswith("(run)")]
    assert waiting and all(thread.daemon for thread in waiting)
    met.store._objects = answers  # Once the server is gone all threads end.
  at_exit.register.call_args.args[0].__self__.written = [Future()]
  at_exit.register.call_args.args[0]()
  assert "a snapshot that was not written 0.2 s after" in caplog.text


@pytest.mark.parametrize(
  ("name", "secret", "says"),
  [("oslo", "absent", "make_secret"), ("Oslo", SECRET, "replica='Oslo' must")],
)
def test_a_replica_whose_name_or_secret_is_wrong_is_refused(
  name, secret, says, tmp_path
):
  address = MailboxAddress(tmp_path / "place", name, secret)
  config = settings("diloco")
  trainer = Trainer(
    config, tmp_path / "run", overrides=runs.TINY, address=address
  )
  with pytest.raises(checkpoint.RefusedError, match=says) as error:
    trainer.run()
  assert "\n" not in str(error.value) and not (tmp_path / "place").exists()
