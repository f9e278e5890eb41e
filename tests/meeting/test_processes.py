"""Three processes that are disturbed at a drawn moment, as a seed says."""

import json
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from dilocox_jax.meeting.members import write_secret
from tests.oracles import mailbox as twin

ROOT = pathlib.Path(__file__).parents[2]
NAMES = ("oslo", "rome", "lima")
EVENTS, GRACE_S = 60, 1.0
# The second snapshot is written in the middle, and nothing is deleted: the twin
# needs all manifests.
RULES = dict(replicas=3, quorum=1, grace_s=GRACE_S, snapshot_every=EVENTS // 2)


class Group:
  """Three processes that meet in a folder."""

  def __init__(self, folder: pathlib.Path, seed: int):
    self.folder, self.store = folder, folder / "store"
    self.draw = random.Random(seed)
    write_secret(folder / "secret")
    self.running: dict[str, subprocess.Popen] = {}
    for number, name in enumerate(NAMES):
      self.start(name, skew=3600.0 * number)

  def start(self, name: str, skew: float = 0.0):
    options = {
      "name": name,
      "events": EVENTS,
      "folder": str(self.store),
      "secret": str(self.folder / "secret"),
      "rules": RULES,
      "skew": skew,
      "result": str(self.folder / f"{name}.json"),
    }
    with (self.folder / f"{name}.log").open("ab") as log:
      process = subprocess.Popen(
        [sys.executable, "-m", "tests.meeting.world", json.dumps(options)],
        cwd=ROOT,
        stderr=log,
      )
    self.running[name] = process

  def kill(self, *names: str) -> None:
    for name in names:
      self.running[name].send_signal(signal.SIGKILL)
      self.running[name].wait()

  def at(self, event: int) -> None:
    """Waits until an event is settled."""
    path = self.store / "manifest" / f"{event:010d}.0"
    end = time.monotonic() + 60
    while not path.exists():
      assert time.monotonic() < end, "the run does not go on"
      time.sleep(0.01)

  def moment(self) -> int:
    """Draws an event in the middle of the run, and waits for it."""
    event = self.draw.randrange(5, EVENTS - 25)
    self.at(event)
    return event

  def some(self) -> str:
    return self.draw.choice(NAMES)

  def finish(self) -> dict[str, dict]:
    for process in self.running.values():
      assert process.wait(60) == 0
    return {
      name: json.loads((self.folder / f"{name}.json").read_text())
      for name in self.running
    }

  def lists(self) -> list[list[str]]:
    paths = sorted((self.store / "manifest").glob("*.0"))
    records = [json.loads(path.read_text())["is"] for path in paths]
    return [[each[0] for each in record["listed"]] for record in records]

  def end(self) -> None:
    for process in self.running.values():
      process.kill()
      process.wait()


def kill(group):
  name = group.some()
  group.moment()
  group.kill(name)
  time.sleep(group.draw.uniform(0, 0.5))
  group.start(name)
  return set(NAMES) - {name}


def kill_all(group):
  group.moment()
  group.kill(*NAMES)
  for name in NAMES:
    group.start(name)
  return set()


def freeze(group):
  name = group.some()
  group.moment()
  group.running[name].send_signal(signal.SIGSTOP)
  time.sleep(1.5 * GRACE_S)
  group.running[name].send_signal(signal.SIGCONT)
  return set(NAMES) - {name}


FAULTS = [kill, kill_all, freeze]


@pytest.fixture(name="make")
def make_fixture(tmp_path):
  groups = []

  def make(seed):
    groups.append(Group(tmp_path, seed))
    return groups[-1]

  yield make
  for group in groups:
    group.end()


def survives(group, fault):
  """Disturbs a run, and checks what must hold at its end."""
  survivors = fault(group)
  results = group.finish()
  lists = group.lists()
  assert len(lists) == EVENTS
  expected = twin.under(lists[:-1]).tobytes().hex()
  assert {result["theta"] for result in results.values()} == {expected}
  for name in survivors:
    times = results[name]["times"]
    # It trained for every event, and waited for the grace time at most.
    assert results[name]["losses"] == 0 and len(times) == EVENTS
    waits = [b - a for a, b in zip(times[1:], times[2:], strict=False)]
    assert max(waits) < GRACE_S + 4.0  # On a machine that is busy.
  assert set(lists[-1]) == set(group.running)


@pytest.mark.parametrize("fault", [kill, freeze])
def test_a_run_survives(make, fault):
  survives(make(0), fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_run_survives_at_a_drawn_moment(make, fault, seed):
  survives(make(seed), fault)
