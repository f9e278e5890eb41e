"""The protocol beside kills, failing calls and damaged objects."""

import os
import pathlib
import random
import shutil
import tempfile

import hypothesis
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from dilocox_jax.mailbox_protocol import messages
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from tests.mailbox import foreign
from tests.mailbox.world import (
  FolderObjects,
  Process,
  Toy,
  World,
  assert_same_lists,
)

NAMES = ("a", "b", "c")
EVENTS = 12
# What may happen to a call of the store.
OUTCOMES = [
  "fail",
  "answer lost",
  "later",  # The call has failed, and its effect comes all the same.
  "kill",
  "kill later",  # The same, and the process is gone.
]
# What a stranger may do to an object.
DAMAGES = {
  "delete": lambda data: None,
  "flip": lambda data: data[:-1] + bytes([data[-1] ^ 4]),
  "cut": lambda data: data[: len(data) // 2],
  "enlarge": lambda data: data + bytes(100),
}


def bits(marks: bytes) -> int:
  return int.from_bytes(marks, "little")


class Replicas(stateful.RuleBasedStateMachine):
  """Three replicas of which each may be disturbed at every call."""

  in_shares_of = ()  # Names of the replicas, if they make means in shares.

  @stateful.initialize(
    turns=st.integers(1, 2),
    delay=st.integers(0, 2),
    quorum=st.integers(1, 2),
    every=st.integers(2, 4),
    repeats=st.booleans(),
    are_unlike=st.booleans(),
  )
  def begin(self, turns, delay, quorum, every, repeats, are_unlike):
    self.world = self.new_world()
    self.rules_of_run = MailboxRules(
      replicas=3,
      quorum=quorum,
      grace_s=5.0,
      snapshot_every=every,
      shares="on" if self.in_shares_of else "off",
    )
    self.turns = turns
    self.delay = delay
    self.repeats = repeats  # Whether a second life does the same work.
    self.are_unlike = are_unlike  # Whether the machine of "b" rounds up.
    self.lives: list[Toy] = []
    self.checkpoints = {name: [] for name in NAMES}
    self.damaged: tuple[str, bytes] | None = None
    self.running = {name: self._started(name) for name in NAMES}

  def new_world(self) -> World:
    return World()

  def plant(self, path: str) -> None:
    """Puts something foreign at a path that is free."""
    self.world.objects.setdefault(path, b"foreign")

  def _started(self, name: str, checkpoint=None) -> Process:
    toy = Toy(
      name,
      EVENTS,
      turns=self.turns,
      delay=self.delay,
      noise=0.0 if self.repeats else 0.01 * len(self.lives),
      rounds_up=self.are_unlike and name == "b",
      in_shares_of=self.in_shares_of,
      checkpoint=checkpoint,
    )
    self.lives.append(toy)
    skew = 3600.0 * NAMES.index(name)
    return Process(self.world, toy, self.rules_of_run, skew)

  @stateful.rule(name=st.sampled_from(NAMES), calls=st.integers(1, 60))
  def move(self, name, calls):
    """One replica alone goes on; the others stand still."""
    process = self.running[name]
    for _ in range(calls):
      if process.wakes_at > self.world.now:
        self.world.now = process.wakes_at
      process.step()

  @stateful.rule(calls=st.integers(1, 300))
  def move_all(self, calls):
    """All go on in turns."""
    for _ in range(calls):
      self.world.turn(self.running.values())

  @stateful.rule(name=st.sampled_from(NAMES), outcome=st.sampled_from(OUTCOMES))
  def disturb(self, name, outcome):
    """The next call of a replica goes wrong."""
    self.running[name].step(outcome)

  @stateful.rule(name=st.sampled_from(NAMES))
  def save(self, name):
    """A replica writes a checkpoint."""
    checkpoint = self.running[name].toy.checkpoint
    if checkpoint is not None:
      self.checkpoints[name].append(checkpoint)

  @stateful.rule(name=st.sampled_from(NAMES), age=st.integers(0, 3))
  def start_again(self, name, age):
    """A replica that was killed goes on from a checkpoint, or begins anew."""
    if self.running[name].has_ended and not self._has_finished(name):
      saved = self.checkpoints[name]
      checkpoint = saved[-1 - age] if age < len(saved) else None
      self.running[name] = self._started(name, checkpoint)

  @stateful.rule(index=st.integers(0, 5))
  def arrive(self, index):
    """Something that was on its way reaches the store."""
    if index < len(self.world.on_its_way):
      self.world.on_its_way.pop(index)()

  @stateful.rule(seconds=st.floats(0.1, 20))
  def wait(self, seconds):
    """Time goes on while nobody moves."""
    self.world.now += seconds

  @stateful.rule(
    number=st.integers(0, 2**16), damage=st.sampled_from(sorted(DAMAGES))
  )
  def damage_an_object(self, number, damage):
    """A stranger damages an object, if the one before is whole again."""
    if self.damaged is not None:
      path, data = self.damaged
      if self.world.objects.get(path) != data:
        return
    if messages.RUN not in self.world.objects:
      return  # The run has not begun.
    path = sorted(self.world.objects)[number % len(self.world.objects)]
    data = self.world.objects.pop(path)
    self.damaged = path, data
    new = DAMAGES[damage](data)
    if new is not None:
      self.world.objects[path] = new

  @stateful.rule(
    event=st.integers(0, EVENTS), name=st.sampled_from(NAMES), kind=st.data()
  )
  def intrude(self, event, name, kind):
    """A stranger writes an object under a name that is free so far."""
    if messages.RUN not in self.world.objects:
      return  # Nobody begins a run in a place that holds events.
    paths = [
      messages.message_path(event, 0, name),
      messages.manifest_path(event, 0),
      messages.proposal_path(event, 0),
      messages.snapshot_path(event, "index"),
      messages.snapshot_path(event, "claim"),
      messages.seat_path(NAMES.index(name)),
      messages.share_path(event, 0, NAMES.index(name)),
      messages.residual_path(event, 0, NAMES.index(name)),
      messages.gone_paths(event)[0],
      "event/0000000000/of/a/stranger",
    ]
    self.plant(kind.draw(st.sampled_from(paths)))

  def _has_finished(self, name: str) -> bool:
    return self.running[name].toy.event >= EVENTS

  @stateful.invariant()
  def no_replica_fails(self):
    for process in getattr(self, "running", {}).values():
      if process.error is not None:
        raise process.error

  @stateful.invariant()
  def nobody_applies_another_list(self):
    assert_same_lists(getattr(self, "lives", ()))

  @stateful.invariant()
  def no_unit_is_averaged_twice(self):
    total: dict[str, int] = {}
    seen = set()
    for toy in getattr(self, "lives", ()):
      for event, name, marks in toy.credited:
        if (event, name) not in seen:
          seen.add((event, name))
          assert not total.get(name, 0) & bits(marks), (event, name)
          total[name] = total.get(name, 0) | bits(marks)

  def _nothing_is_lost(self):
    """Every unit of a replica was averaged, or the replica holds it back.

    Exceptions are replicas that began again from a snapshot, and those whose
    earlier life has sent in their place.
    """
    averaged = dict.fromkeys(NAMES, 0)
    for toy in self.lives:
      for _, name, marks in toy.credited:
        averaged[name] |= bits(marks)
    for name, process in self.running.items():
      toy = process.toy
      if not toy.losses and not toy.superseded:
        kept = averaged[name] | bits(toy.held_back.tobytes())
        assert not bits(toy.done.tobytes()) & ~kept

  def _is_message_lost(self) -> bool:
    """Whether a stranger damaged a message and no replica has restored it.

    If all replicas that have read it are dead or have finished, and there is no
    later snapshot, then the others wait, and say what a person can do.
    """
    if self.damaged is None:
      return False
    path, data = self.damaged
    is_message = path.startswith(messages.EVENTS)
    return is_message and self.world.objects.get(path) != data

  def teardown(self):
    if not hasattr(self, "running"):
      return
    for name in NAMES:  # Whoever is away comes back, and nothing fails now.
      self.start_again(name, 0)
    processes = list(self.running.values())
    has_ended = self.world.move_to_end(processes, turns=6000)
    self.no_replica_fails()
    self.nobody_applies_another_list()
    self.no_unit_is_averaged_twice()
    if not has_ended:
      assert self._is_message_lost(), "a replica waits for ever"
      for process in processes:
        process.step("kill")
      return
    self._nothing_is_lost()
    first, *others = [process.toy for process in processes]
    for other in others:
      assert other.event == first.event
      if self.are_unlike:
        gap = np.linalg.norm(other.theta - first.theta)
        assert gap <= 1e-5 * np.linalg.norm(first.theta)
      else:
        assert other.theta.tobytes() == first.theta.tobytes()


class ReplicasWithShares(Replicas):
  """The same, and each mean of two replicas or more is made in shares."""

  in_shares_of = NAMES


class ReplicasInAFolder(Replicas):
  """The same in a folder, in which a stranger makes links, FIFOs and folders.

  They stand under names that replicas will need.
  """

  def new_world(self) -> World:
    self.folder = pathlib.Path(tempfile.mkdtemp(prefix="protocol"))
    self.victim = self.folder / "victim"
    self.victim.mkdir()
    (self.victim / "thesis.tex").write_text("precious")
    self.random = random.Random(0)
    return World(FolderObjects(self.folder / "place"))

  def plant(self, path: str) -> None:
    place = self.folder / "place"
    target = place / path
    if not os.path.lexists(target) and target.parent.is_dir():
      self.random.choice(foreign.FOREIGN)(target, self.victim)

  def teardown(self):
    if not hasattr(self, "running"):
      return
    super().teardown()
    assert [path.name for path in self.victim.iterdir()] == ["thesis.tex"]
    assert (self.victim / "thesis.tex").read_text() == "precious"
    shutil.rmtree(self.folder)


TestReplicas = Replicas.TestCase
TestReplicas.settings = hypothesis.settings(
  max_examples=40, stateful_step_count=40, deadline=None
)


TestReplicasWithShares = ReplicasWithShares.TestCase
TestReplicasWithShares.settings = hypothesis.settings(
  max_examples=40, stateful_step_count=40, deadline=None
)


TestReplicasInAFolder = ReplicasInAFolder.TestCase
TestReplicasInAFolder.settings = hypothesis.settings(
  max_examples=8, stateful_step_count=30, deadline=None
)


@pytest.mark.slow
class TestReplicasInAFolderForLonger(ReplicasInAFolder.TestCase):
  settings = hypothesis.settings(
    max_examples=100, stateful_step_count=60, deadline=None
  )


@pytest.mark.slow
class TestReplicasForLonger(Replicas.TestCase):
  settings = hypothesis.settings(
    max_examples=500, stateful_step_count=60, deadline=None
  )


@pytest.mark.slow
@pytest.mark.timeout(3600)  # Twelve minutes on two busy cores.
class TestReplicasWithSharesForLonger(ReplicasWithShares.TestCase):
  settings = hypothesis.settings(
    max_examples=500, stateful_step_count=60, deadline=None
  )
