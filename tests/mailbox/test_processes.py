"""Runs of three real processes that are disturbed when a seed says."""

import itertools
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, cast

import jax
import numpy as np
import pytest

from dilocox_jax.aggregators.sizes import stacked_shapes
from dilocox_jax.codecs.quantize import Float
from dilocox_jax.mailbox_protocol.fingerprints import rows_bytes
from dilocox_jax.mailbox_protocol.messages import HEADER_BYTES, arrays_in
from dilocox_jax.mailbox_protocol.roster import PROTOCOL_VERSION, write_secret
from dilocox_jax.mailbox_protocol.signer import content_bytes
from dilocox_jax.metrics.lines import read_rows
from dilocox_jax.reference.fingerprint import num_blocks
from dilocox_jax.trees import shapes_by_path
from tests import runs
from tests.mailbox.slow_train import HURRY, ROUND_S
from tests.tiers import slow

ROOT = pathlib.Path(__file__).parents[2]
NAMES = ("oslo", "rome", "lima")
# Of two snapshots none is deleted, nor an event, and the twin needs all.
EVENTS = 47
SECOND = 24
GRACE_S = 5.0
H = 2
LEARNING_RATE = 0.7
MOMENTUM = 0.6
BUSY_S = 10.0
CONFIG = {
  "sync.method": "diloco",
  "sync.warm_start_steps": 0,
  "sync.sync_interval": H,
  "total_steps": EVENTS * H,
  "outer.learning_rate": LEARNING_RATE,
  "outer.momentum": MOMENTUM,
  "evaluation.interval_steps": 0,
  "checkpoint.interval_steps": 4 * H,
  "mesh.num_replicas": 3,
  "mailbox.grace_s": GRACE_S,
  "mailbox.snapshot_every": SECOND,
}


class Group:
  """Three processes that meet in a folder."""

  def __init__(self, folder, seed, skew_s=0):
    self.folder = folder
    self.store = folder / "store"
    self.draw = random.Random(seed)
    self.hurry = folder / "hurry"
    write_secret(folder / "secret")
    self.running = {}
    for number, name in enumerate(NAMES):
      offset = str(number * skew_s)
      clock = "unshare", "--time", "--fork", "--kill-child", "--monotonic"
      self.start(name, before=(*clock, offset) if skew_s else ())

  def start(self, name, *more, before=(), where=ROOT):
    flags = [f"--config.{field}={value}" for field, value in CONFIG.items()]
    own = f"--mailbox={self.store}", f"--secret={self.folder}/secret"
    command = [
      *(*before, sys.executable, "-m", "tests.mailbox.slow_train"),
      *(*runs.SMALL_FLAGS, *flags, *own, "--sample_tokens=0", *more),
      *(f"--workdir={self.folder / name}", f"--replica={name}"),
    ]
    given = {"cwd": where, "env": {**os.environ, HURRY: str(self.hurry)}}
    with (self.folder / f"{name}.log").open("ab") as log:
      self.running[name] = subprocess.Popen(command, **given, stderr=log)
    return self.running[name]

  def kill(self, *names):
    for name in names:
      self.running[name].kill()
      self.running[name].wait()

  def manifests(self):
    paths = sorted((self.store / "manifest").glob("*.0"))
    return [json.loads(path.read_text())["is"] for path in paths]

  def lists(self):
    return [[each[0] for each in one["listed"]] for one in self.manifests()]

  def moment(self, first=3, last=6):
    """Draws an event, and waits until it is settled."""
    event = self.draw.randint(first, last)
    end = time.monotonic() + 200
    while len(self.lists()) <= event:
      assert time.monotonic() < end, "the run does not go on"
      time.sleep(0.05)
    return self.draw.sample(NAMES, 3)

  def finish(self, survivors):
    """Goes on quickly once all are back; returns the worst wait (s)."""
    begun = len(self.lists()) + 2
    end = time.monotonic() + 300
    while all(set(each) != set(NAMES) for each in self.lists()[begun:]):
      assert time.monotonic() < end, f"{self.lists()[-1]} are there"
      time.sleep(0.1)
    self.hurry.touch()
    for name in NAMES:
      assert self.running[name].wait(300) == 0
    self._goes_on_within_two_rounds()
    worst = 0.0
    for name in survivors:
      timings = read_rows(self.folder / name / "timing.jsonl")
      exposed = [r["exposed_s"] for r in timings if r["event"] == "round"]
      assert len(exposed) == EVENTS  # It lost no step.
      worst = max(worst, *exposed[1:])
    print(f"worst wait {worst:.1f} s")
    return worst

  def _goes_on_within_two_rounds(self):
    """Who is there since an event is listed then or soon after."""
    for path in sorted((self.store / "seat").iterdir()):
      name, since = json.loads(path.read_text())["is"].values()
      first = [name in each for each in self.lists()[since:]].index(True)
      assert first <= 2

  def twin(self, like):
    """The outer parameters under the manifests' lists, leaf by leaf."""
    shapes = stacked_shapes(shapes_by_path(like))
    given = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    kinds = [(k.dtype, k.shape) for k in jax.eval_shape(Float().encode, given)]
    raw = content_of(self.store / f"snapshot/{0:010d}/arrays")
    both = arrays_in(raw, 2 * [(np.dtype("f4"), shape) for shape in shapes])
    theta = both[: len(shapes)]
    trace = both[len(shapes) :]
    num_row_bytes = rows_bytes(sum(num_blocks(leaf.size) for leaf in both))
    for event, record in enumerate(self.manifests()):
      folder = self.store / f"event/{event:010d}/0"
      mean: list[Any] = [np.zeros(shape) for shape in shapes]
      for name, _, weight, _ in record["listed"]:
        raw = content_of(folder / name)[HEADER_BYTES + num_row_bytes :]
        own: Any = Float().decode(cast(Any, arrays_in(raw, kinds)), shapes)
        share = weight / sum(each[2] for each in record["listed"])
        own = [share * np.float64(leaf) for leaf in own]
        mean = list(map(np.add, mean, own))
      trace = [g + MOMENTUM * t for g, t in zip(mean, trace, strict=True)]
      steps = [g + MOMENTUM * t for g, t in zip(mean, trace, strict=True)]
      theta = [p - LEARNING_RATE * s for p, s in zip(theta, steps, strict=True)]
    return theta


def content_of(path):
  """Returns the content of an object, without its tags."""
  data = path.read_bytes()
  return data[len(data) - content_bytes(len(data)) :]


def kill(group, count=1):
  names = group.moment()
  group.kill(*names[:count])
  time.sleep(group.draw.uniform(0, 1))
  for name in names[:count]:
    group.start(name)
  return names[count:]


def kill_two(group):
  return kill(group, 2)


def kill_all(group):
  return kill(group, 3)


def freeze(group):
  name, *others = group.moment()
  group.running[name].send_signal(signal.SIGSTOP)
  time.sleep(30)
  group.running[name].send_signal(signal.SIGCONT)
  return others


def full_disk(group):
  """Nothing that it writes fits, and who ended of it is started again."""
  name, *others = group.moment()
  pid = group.running[name].pid
  limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, -1))
  time.sleep(group.draw.uniform(2, 10))
  resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
  time.sleep(2)
  if group.running[name].poll() is not None:
    group.start(name)
  return others


def store_away(group):
  group.moment()
  away = group.store.rename(group.folder / "away")
  group.store.touch()  # A store that takes nothing.
  time.sleep(20)
  group.store.unlink()
  away.rename(group.store)
  return list(NAMES)


def wrong_config(group):
  group.moment()
  process = group.start("bern", "--config.inner.learning_rate=0.5")
  return _is_refused(group, process, "config.inner.learning_rate is 0.5")


def other_code(group):
  """A replica goes on with another release of the same protocol."""
  name, *others = group.moment()
  place = other_release(group, "files.py", lambda text: text + "# Changed.\n")
  group.kill(name)
  group.start(name, where=place)
  return others


def other_protocol(group):
  group.moment()
  constant = f"PROTOCOL_VERSION = {PROTOCOL_VERSION}"
  place = other_release(
    group,
    "mailbox_protocol/roster.py",
    lambda text: text.replace(constant, f"{constant} + 1"),
  )
  process = group.start("bern", where=place)
  line = (
    f"has version {PROTOCOL_VERSION + 1} of the mailbox's protocol, and the run"
    f" at {group.store} has version {PROTOCOL_VERSION}: "
  )
  return _is_refused(group, process, line)


def other_release(group, path, change):
  """Returns a folder with a copy of the code in which a file is changed."""
  place = group.folder / "other"
  for folder in ("dilocox_jax", "experiments", "tests"):
    shutil.copytree(ROOT / folder, place / folder)
  file = place / "dilocox_jax" / path
  text = file.read_text()
  assert change(text) != text
  file.write_text(change(text))
  return place


def _is_refused(group, process, line):
  assert process.wait(100) != 0
  assert line in (group.folder / "bern.log").read_text()
  return list(NAMES)


def damaged_snapshot(group):
  group.hurry.touch()
  group.moment(SECOND // 2, SECOND // 2)
  group.hurry.unlink()
  name, *others = group.moment(SECOND + 1, SECOND + 4)
  group.kill(name)
  shutil.rmtree(group.folder / name)
  path = group.store / f"snapshot/{SECOND:010d}/arrays"
  path.write_bytes(path.read_bytes()[:-1] + b"?")
  group.start(name)
  return others


def clocks(group):
  group.moment()
  return list(NAMES)


FAULTS = [
  *(kill, freeze, full_disk, wrong_config, other_code, other_protocol),
  *(kill_two, kill_all, store_away, damaged_snapshot, clocks),
]


@pytest.mark.parametrize(
  ("fault", "seed"),
  [(kill, 0), *slow(*itertools.product(FAULTS, range(1, 11)))],
)
def test_a_run_survives(tmp_path, fault, seed):
  group = Group(tmp_path, seed, 3600 * (fault is clocks))
  try:
    worst = group.finish(fault(group))
  finally:
    for process in group.running.values():
      process.kill()
      process.wait()
  assert worst < 20 * (fault is store_away) + GRACE_S + ROUND_S + BUSY_S
  states = [runs.saved(tmp_path / name)[0] for name in NAMES]
  first, *others = (state.fragments[0].params for state in states)
  for other in others:
    runs.assert_same_bits(first, other)
  leaves = map(np.ravel, jax.tree.leaves(first))
  for own, twins in zip(leaves, group.twin(first), strict=True):
    np.testing.assert_allclose(own, np.ravel(twins), rtol=1e-4, atol=1e-6)
