import numpy as np
import pytest

from dilocox_jax.aggregators.collectives import message_bytes
from dilocox_jax.codecs.low_rank import LowRank, with_rank
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.codecs.sparse import RandomMask, TopK
from dilocox_jax.plan.adaptive import Policy, RoundSetting
from dilocox_jax.plan.ranks import energy_rank

FIRST, INTERVAL, WINDOW = 32, 64, 5
SHAPES = {"w": (256, 256), "blocks/w": (4, 128, 512)}
LINK = 1 / INTERVAL  # Of the first transfer's bytes, in one inner step.


def bytes_of(rank):
  return message_bytes(LowRank(rank, then=Int(4)), SHAPES)


def policy(**kwargs):
  first = RoundSetting(FIRST, INTERVAL)
  return Policy(first, WINDOW, adapts_interval=True, **kwargs)


def spectrum(rank, noise=1e-4):
  """An update with so many directions and a little of everything else."""
  values = np.full(FIRST, noise)
  values[:rank] = 1
  return values[None]


def follow(steered, ranks, chooses=True):
  """The choices in force while the update's rank takes these values."""
  now, choices, seen = steered.first, [], []
  for rank in ranks:
    choices.append(now)
    # What is sent shows no more directions than it has room for.
    seen.append(energy_rank(spectrum(rank)[:, : now.rank], 0.95))
    if len(seen) == WINDOW:
      if chooses:
        now = steered.next_setting(seen, bytes_of)
      seen = []
  return choices


FALLING = [32] * 10 + [16] * 10 + [8] * 10 + [4] * 15


def assert_follows(choices):
  for number, rank in enumerate(FALLING):
    settled = number >= WINDOW and rank == FALLING[number - WINDOW]
    if settled and number % WINDOW == 0:
      assert rank <= choices[number].rank <= 2 * rank
  # Transfers hide behind the local steps all the time.
  for choice in choices:
    transfer_steps = bytes_of(choice.rank) / bytes_of(FIRST) / LINK
    assert transfer_steps <= choice.sync_interval
  sent = [bytes_of(choice.rank) for choice in choices]
  assert sent[-1] < 0.25 * sent[0]
  assert sent == sorted(sent, reverse=True)


def test_rank_and_interval_follow_an_update_whose_rank_falls():
  assert_follows(follow(policy(), FALLING))


def test_a_frozen_rank_does_not_pass_for_one_that_follows():
  with pytest.raises(AssertionError):
    assert_follows(follow(policy(), FALLING, chooses=False))


def test_the_interval_is_the_shortest_that_hides_the_transfer():
  for choice in follow(policy(), FALLING):
    transfer_steps = bytes_of(choice.rank) / bytes_of(FIRST) / LINK
    assert choice.sync_interval - 1 < transfer_steps


def test_an_update_that_fills_its_rank_is_given_more_room():
  steered = policy()
  ladder = steered.ladder
  now = RoundSetting(ladder[-1], 8)
  for wider in reversed(ladder[:-1]):
    now = steered.next_setting([now.rank] * WINDOW, bytes_of)
    assert now.rank == wider
  assert steered.next_setting([now.rank], bytes_of) == steered.first


def test_the_interval_stays_where_only_the_rank_adapts():
  steered = Policy(RoundSetting(FIRST, INTERVAL), WINDOW)
  assert {c.sync_interval for c in follow(steered, FALLING)} == {INTERVAL}


@pytest.mark.parametrize("rank", [1, 2, 7, 24, 2048])
def test_a_ladder_is_short_and_begins_at_the_first_rank(rank):
  ladder = Policy(RoundSetting(rank, INTERVAL)).ladder
  assert ladder[0] == rank
  assert ladder[-1] == max(1, rank // 8)
  assert len(ladder) <= 5
  assert list(ladder) == sorted(set(ladder), reverse=True)


def test_a_chosen_rank_replaces_that_of_the_codec():
  chosen = with_rank(LowRank(9, 2, then=Int(4)), 5, 9)
  assert chosen == LowRank(5, 2, 9, Int(4))
  other = RandomMask(0.5, then=TopK(0.1, then=Int(2)))
  assert with_rank(other, 5, 9) == other
