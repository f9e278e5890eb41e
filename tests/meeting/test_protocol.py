"""The protocol under a store that delays, reorders and fails, and kills."""

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from dilocox_jax.meeting.members import MailboxRules
from tests.meeting.world import MARKS, Process, Toy, World, assert_same_lists

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


class Replicas(stateful.RuleBasedStateMachine):
  """Three replicas of which each may be disturbed at every call."""

  @stateful.initialize(
    turns=st.integers(1, 2),
    delay=st.integers(0, 2),
    quorum=st.integers(1, 2),
    every=st.integers(2, 4),
  )
  def begin(self, turns, delay, quorum, every):
    self.world = World()
    self.terms = MailboxRules(
      replicas=3, quorum=quorum, grace_s=5.0, snapshot_every=every
    )
    self.turns, self.delay = turns, delay
    self.marks = iter(range(64 * MARKS))
    self.lives: list[Toy] = []
    self.running = {name: self._started(name) for name in NAMES}

  def _started(self, name: str) -> Process:
    toy = Toy(
      name, EVENTS, turns=self.turns, delay=self.delay, marks=self.marks
    )
    self.lives.append(toy)
    return Process(self.world, toy, self.terms, 3600.0 * NAMES.index(name))

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
  def start_again(self, name):
    """A replica that was killed comes back."""
    if self.running[name].has_ended and not self._has_finished(name):
      self.running[name] = self._started(name)

  @stateful.rule(index=st.integers(0, 5))
  def arrive(self, index):
    """Something that was on its way reaches the store."""
    if index < len(self.world.on_its_way):
      self.world.on_its_way.pop(index)()

  @stateful.rule(seconds=st.floats(0.1, 20))
  def wait(self, seconds):
    """Time goes on while nobody moves."""
    self.world.now += seconds

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
  def nothing_is_applied_twice(self):
    total, seen = {}, set()
    for toy in getattr(self, "lives", ()):
      for event, name, marks in toy.credited:
        if (event, name) not in seen:
          seen.add((event, name))
          bits = int.from_bytes(marks, "little")
          assert not total.get(name, 0) & bits
          total[name] = total.get(name, 0) | bits

  def _nothing_is_lost(self):
    """What was made was averaged, or is still there."""
    averaged = {name: 0 for name in NAMES}
    for toy in self.lives:
      for _, name, marks in toy.credited:
        averaged[name] |= int.from_bytes(marks, "little")
    for name, process in self.running.items():
      if not process.toy.losses:
        made, kept = (
          int.from_bytes(marks.tobytes(), "little")
          for marks in (process.toy.made, process.toy.kept)
        )
        assert not made & ~(averaged[name] | kept)

  def teardown(self):
    if not hasattr(self, "running"):
      return
    for name in NAMES:  # Whoever is away comes back, and nothing fails now.
      self.start_again(name)
    self.world.finish(self.running.values())
    self.nobody_applies_another_list()
    self.nothing_is_applied_twice()
    self._nothing_is_lost()
    first, *others = [process.toy for process in self.running.values()]
    for other in others:
      assert other.event == first.event
      assert other.theta.tobytes() == first.theta.tobytes()


TestReplicas = Replicas.TestCase
TestReplicas.settings = hypothesis.settings(
  max_examples=40, stateful_step_count=40, deadline=None
)


@pytest.mark.slow
class TestReplicasForLonger(Replicas.TestCase):
  settings = hypothesis.settings(
    max_examples=500, stateful_step_count=60, deadline=None
  )
