"""Shares of a mean: who makes them, and what becomes of wrong and late ones."""

import logging

import numpy as np
import pytest

from dilocox_jax.mailbox_protocol import roster
from dilocox_jax.mailbox_protocol import shares as shares_module
from dilocox_jax.mailbox_protocol.agreement import Memory, StoppedError
from dilocox_jax.mailbox_protocol.manifest import Manifest
from dilocox_jax.mailbox_protocol.messages import (
  Inbox,
  residual_path,
  share_path,
)
from dilocox_jax.mailbox_protocol.roster import MailboxRules
from dilocox_jax.mailbox_protocol.signer import Signer
from dilocox_jax.plan.collectives import num_slices
from tests.mailbox.world import (
  SECRET,
  Process,
  Toy,
  World,
  assert_same_lists,
)

NAMES = ("a", "b", "c", "d")
EVENTS = 6


class Run:
  """Four replicas of a run whose means are made in shares."""

  def __init__(self, names=NAMES, events=EVENTS):
    self.world = World()
    self.rules = MailboxRules(replicas=len(names), quorum=2, grace_s=5.0)
    self.toys = [Toy(name, events, in_shares_of=NAMES) for name in names]
    self.processes = [self.started(toy) for toy in self.toys]

  def started(self, toy):
    return Process(self.world, toy, self.rules)

  def move_until(self, is_reached, turns=20_000):
    """Moves all until something is true."""
    for _ in range(turns):
      if is_reached():
        return
      self.world.turn(self.processes)
    raise AssertionError("it is never reached")

  def finish(self):
    self.world.finish(self.processes)
    assert_same_lists(self.toys)
    first, *others = [toy for toy in self.toys if toy.event >= toy.events]
    for other in others:
      assert other.theta.tobytes() == first.theta.tobytes()

  def has(self, path):
    return path in self.world.objects


def undisturbed():
  run = Run()
  run.finish()
  return run


@pytest.mark.parametrize(
  ("shares", "num_replicas", "expected"),
  [
    ("auto", 3, 0),
    ("auto", 4, 4),
    ("auto", 64, 64),
    ("on", 1, 0),
    ("on", 2, 2),
    ("off", 64, 0),
  ],
)
def test_messages_are_cut_from_four_replicas_on(shares, num_replicas, expected):
  assert num_slices(shares, num_replicas, is_coarse=False) == expected
  is_on = shares == "on"
  assert num_slices(shares, num_replicas, is_coarse=True) == is_on * expected


def test_each_replica_makes_its_own_share_and_residual():
  run = undisturbed()
  for number in range(len(NAMES)):
    assert run.has(share_path(1, 0, number))
    assert run.has(residual_path(1, 0, number))
  assert not run.has(share_path(0, 0, 0))  # Nobody was expected before.


def test_a_share_whose_maker_dies_is_made_by_others():
  run = Run()
  maker = run.processes[1]
  run.move_until(lambda: run.has("manifest/0000000002.0"))
  maker.step("kill")
  assert not run.has(share_path(2, 0, 1))
  run.finish()
  assert run.has(share_path(2, 0, 1))
  assert all(toy.event == EVENTS for toy in run.toys if toy.name != "b")


def test_a_late_share_is_that_of_the_others():
  run = Run()
  late = run.processes[1]
  run.move_until(lambda: run.has("manifest/0000000002.0"))
  late.wakes_at = run.world.now + 30.0
  run.move_until(lambda: run.has(share_path(2, 0, 1)))
  assert run.world.now < late.wakes_at
  run.finish()
  assert all(toy.event == EVENTS for toy in run.toys)


@pytest.mark.parametrize("damage", ["flip", "cut", "foreign"])
def test_a_damaged_share_is_made_again_with_the_same_bytes(damage):
  run = Run()
  path = share_path(2, 0, 1)
  run.move_until(lambda: run.has(path))
  whole = run.world.objects[path]
  run.world.objects[path] = {
    "flip": whole[:-1] + bytes([whole[-1] ^ 4]),
    "cut": whole[:-4],
    "foreign": b"foreign",
  }[damage]
  run.finish()
  assert all(toy.event == EVENTS for toy in run.toys)
  assert undisturbed().toys[0].theta.tobytes() == run.toys[0].theta.tobytes()


def test_a_share_of_another_list_is_not_taken():
  run = Run()
  other = undisturbed()
  path = share_path(2, 0, 1)
  run.move_until(lambda: run.has("manifest/0000000001.0"))
  run_id = run.world.records("run.json")["run.json"]["id"]
  signer = Signer(SECRET, run_id)
  content = bytes(len(other.world.objects[path]) - 64)
  run.world.objects[path] = b"".join(signer.sign(path, content))
  run.finish()
  assert other.toys[0].theta.tobytes() == run.toys[0].theta.tobytes()


def test_a_share_above_the_largest_message_is_refused(caplog):
  run = Run()
  path = share_path(2, 0, 1)
  run.move_until(lambda: run.has("manifest/0000000002.0"))
  whole = undisturbed()
  records = run.world.records("manifest")
  agreed = Manifest.from_json(records["manifest/0000000002.0"])
  signer = Signer(SECRET, run.world.records("run.json")["run.json"]["id"])
  num_values = (len(whole.world.objects[path]) - 64 - 33) // 4
  values = np.full(num_values, 1000, np.float32)
  content = bytes.fromhex(agreed.digest()) + bytes(1) + values.tobytes()
  run.world.objects[path] = b"".join(signer.sign(path, content))
  run.finish()
  assert "is refused: its norm" in caplog.text
  assert whole.toys[0].theta.tobytes() == run.toys[0].theta.tobytes()


def test_a_maker_whose_share_is_too_large_does_not_apply_it(
  monkeypatch, caplog
):
  run = Run()
  made = shares_module.make_share
  is_broken = [True]

  def broken(tables, slices, **arguments):
    share, residual = made(tables, slices, **arguments)
    if is_broken[0]:
      is_broken[0] = False
      share = tables.encode([1000 * (1 + x) for x in tables.decode(share)])
    return share, residual

  run.move_until(lambda: run.has("proposal/0000000002.0"))
  monkeypatch.setattr(shares_module, "make_share", broken)
  run.finish()
  assert not is_broken[0]
  assert caplog.text.count("is refused: its norm") == 1


def test_a_wrong_share_is_found_by_the_replica_that_checks_it(
  monkeypatch, caplog
):
  monkeypatch.setattr(shares_module, "CHECKED_TURNS", 1)
  caplog.set_level(logging.WARNING)
  undisturbed()
  assert not caplog.text
  break_shares(monkeypatch, "b")
  run = Run(events=7)
  run.finish()
  assert "share 1 of the mean, made by b, differs" in caplog.text
  found = {
    name for toy in run.toys if toy.name != "b" for *_, name in toy.wrong_shares
  }
  assert found == {"b"}


def break_shares(monkeypatch, broken_name):
  """Lets one replica compute half of each share, in every turn."""
  monkeypatch.setattr(shares_module, "CHECKED_TURNS", 1)
  # The name of the run decides who checks which share.
  monkeypatch.setattr(roster.secrets, "token_hex", lambda size: "0" * 2 * size)
  made = shares_module.Shares._made
  computed = shares_module.make_share
  is_broken = [False]

  def broken_share(tables, slices, **arguments):
    share, residual = computed(tables, slices, **arguments)
    if is_broken[0]:
      share = tables.encode([rows * 0.5 for rows in tables.decode(share)])
    return share, residual

  def made_by(shares, number, residual):
    is_broken[0] = shares.name == broken_name
    try:
      return made(shares, number, residual)
    finally:
      is_broken[0] = False

  monkeypatch.setattr(shares_module, "make_share", broken_share)
  monkeypatch.setattr(shares_module.Shares, "_made", made_by)


def test_who_makes_wrong_shares_ends_once_two_others_have_found_some(
  monkeypatch, caplog
):
  caplog.set_level(logging.WARNING)
  break_shares(monkeypatch, "b")
  run = Run(events=40)
  assert run.world.move_to_end(run.processes)
  errors = {process.toy.name: process.error for process in run.processes}
  error = errors.pop("b")
  assert isinstance(error, StoppedError)
  assert str(error).startswith("b makes wrong shares of means, as a and c have")
  assert "\n" not in str(error)
  # It accuses the others, too. But it is the only one.
  assert set(errors.values()) == {None}
  assert "b has found that share" in caplog.text
  a, _, *others = run.toys
  for other in others:
    assert other.event == a.event == 40
    assert other.theta.tobytes() == a.theta.tobytes()


def test_a_residual_is_read_by_the_next_maker_of_the_share(monkeypatch):
  used = []
  made = shares_module.make_share

  def watched(tables, slices, **arguments):
    used.append(arguments["residual"] is not None)
    return made(tables, slices, **arguments)

  monkeypatch.setattr(shares_module, "make_share", watched)
  run = Run()
  maker = run.processes[1]
  run.move_until(lambda: run.has(residual_path(2, 0, 1)))
  run.move_until(lambda: run.has("manifest/0000000003.0"))
  maker.step("kill")
  run.move_until(lambda: run.toys[0].event == 3)
  used.clear()
  run.move_until(lambda: run.has(share_path(3, 0, 1)))
  # All shares of event 3 have the residuals of event 2, that of "b" too.
  assert used and all(used)


def test_residuals_of_other_slices_or_old_intervals_are_dropped():
  turn = Inbox(
    store=None,
    signer=Signer(SECRET, "run"),
    event=9,
    turn=0,
    like=[],
    num_slices=4,
  )
  memory = Memory(event=9, starts=(0, 3, 6), shared={"0.0": (4, 4)})
  assert memory.residual_event(turn) == 4
  memory = Memory(event=9, starts=(0, 3, 6), shared={"0.0": (2, 4)})
  assert memory.residual_event(turn) == -1
  memory = Memory(event=9, starts=(0, 3, 6), shared={"0.0": (4, 5)})
  assert memory.residual_event(turn) == -1


def test_who_comes_back_from_a_checkpoint_applies_the_same_shares():
  run = Run()
  toy = run.toys[1]
  run.move_until(lambda: toy.event == 2 and run.has(share_path(2, 0, 1)))
  checkpoint = toy.checkpoint
  run.processes[1].step("kill")
  again = Toy("b", EVENTS, in_shares_of=NAMES, checkpoint=checkpoint)
  run.toys.append(again)
  run.processes.append(run.started(again))
  run.finish()
  assert again.event == EVENTS
  np.testing.assert_array_equal(again.theta, run.toys[0].theta)
