"""Who has the bucket and not the secret can delay a run, and nothing else."""

import logging
import random

import pytest

from dilocox_jax.mailbox_protocol.roster import MailboxRules
from tests.mailbox.world import Process, Toy, World, assert_same_lists

RULES = MailboxRules(replicas=3, quorum=2, grace_s=5.0, snapshot_every=4)
EVENTS = 30
DISTURBED = 12


def overwrite(draw, objects, path, old):
  objects[path] = draw.randbytes(draw.choice([0, 1, 80, 10_000]))


def truncate(draw, objects, path, old):
  objects[path] = objects[path][: draw.randrange(len(objects[path]) + 1)]


def enlarge(draw, objects, path, old):
  objects[path] += draw.randbytes(1_000_000)


def flip(draw, objects, path, old):
  data = bytearray(objects[path])
  if data:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
  objects[path] = bytes(data)


def rename(draw, objects, path, old):
  objects[path] = objects[draw.choice(sorted(objects))]


def replay(draw, objects, path, old):
  """An object of an earlier run with the same secret."""
  objects[path] = old.get(path, b"")


def delete(draw, objects, path, old):
  del objects[path]


DEEDS = [overwrite, truncate, enlarge, flip, rename, replay, delete]


def replicas(world):
  return [Process(world, Toy(name, EVENTS), RULES) for name in "abc"]


@pytest.fixture(scope="module", name="old")
def old_fixture():
  world = World()
  world.finish(replicas(world))
  return world.objects


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("seed", range(4))
def test_what_a_stranger_does_changes_nothing_that_is_averaged(
  old, deed, seed, caplog
):
  caplog.set_level(logging.CRITICAL)
  draw = random.Random(seed)
  world = World()
  running = replicas(world)
  while not any(process.has_ended for process in running):
    world.turn(running)
    # Whoever is in the middle of the run is disturbed. `run.json` is read at
    # the start alone.
    paths = [path for path in sorted(world.objects) if path != "run.json"]
    if paths and draw.random() < 0.02 and running[0].toy.event < DISTURBED:
      deed(draw, world.objects, draw.choice(paths[-60:]), old)
  world.finish(running)
  assert len({process.toy.theta.tobytes() for process in running}) == 1
  assert_same_lists(process.toy for process in running)
