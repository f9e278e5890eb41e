"""Ranks and H of adaptive runs, collectives, and names that are chosen."""

import inspect

import numpy as np
import optax
import optax.contrib
import pytest

from dilocox_jax.aggregators.sizes import message_bytes
from dilocox_jax.codecs.low_rank import LowRank, with_rank
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.codecs.sparse import RandomMask
from dilocox_jax.plan.adaptive import (
  Policy,
  RoundSetting,
  energy_rank,
  spectra_of,
)
from dilocox_jax.plan.choices import OPTIMIZER_OPTIONS
from dilocox_jax.plan.operations import operation
from dilocox_jax.plan.overlap import PARTS, stretch_ends, stretches


@pytest.mark.parametrize(
  ("spectra", "share", "rank"),
  [
    *(([[8, 4, 2, 1, 1]], s, r) for s, r in [(0.5, 1), (0.51, 2), (0.75, 2)]),
    *(([[8, 4, 2, 1, 1]], s, r) for s, r in [(0.9, 4), (1.0, 5)]),
    ([[3, 3, 3, 0]], 1.0, 3),
    ([[1, 1, 1, 1], [0, 0, 0, 0]], 0.9, 2),  # The second has no energy.
  ],
)
def test_the_energy_rank_holds_its_share_and_no_fewer_directions_do(
  spectra, share, rank
):
  spectra = np.asarray(spectra, float)
  assert energy_rank({"w": spectra}, share) == rank
  # Leaves count by their matrices.
  both = {"w": spectra, "three": np.ones((3 * len(spectra), 8))}
  assert energy_rank(both, 1.0) == (energy_rank({"": spectra}, 1.0) + 24) / 4


def test_factors_give_the_spectrum_of_what_they_multiply_to():
  rng = np.random.default_rng(0)
  right = rng.normal(size=(2, 7, 3))
  basis = np.stack([np.linalg.qr(rng.normal(size=(9, 3)))[0]] * 2)
  padded = np.zeros((3, 5, 5))  # The last layer fills a fragment up.
  used = np.ix_([0, 1], [0, 2, 3], [0, 2, 3])  # Column 1 has no direction.
  padded[used] = right.transpose(0, 2, 1) @ right
  found = spectra_of({"w": padded, "unsent": np.zeros((3, 5, 5))})
  assert found.keys() == {"w"}
  values = np.linalg.svd(basis @ right.transpose(0, 2, 1), compute_uv=False)
  np.testing.assert_allclose(found["w"], values[:, :3] ** 2, rtol=1e-12)


FIRST = 32
INTERVAL = 64
WINDOW = 5
SHAPES = {"w": (256, 256), "blocks/w": (4, 128, 512)}


def bytes_of(rank):
  return message_bytes(LowRank(rank, then=Int(4)), SHAPES)


def test_rank_and_interval_follow_an_update_whose_rank_falls():
  now = RoundSetting(FIRST, INTERVAL)
  sent = []
  steered = Policy(now, "rank_and_interval", WINDOW)
  for rank in (32, 32, 16, 16, 8, 8, 4, 4, 4):
    spectrum = np.full((1, FIRST), 1e-4)  # And a little of everything else.
    spectrum[:, :rank] = 1
    # What is sent shows no more directions than it has room for.
    seen = energy_rank({"w": spectrum[:, : now.rank]}, 0.95)
    now = steered.next_setting([seen] * WINDOW, bytes_of)
    assert rank <= now.rank <= 2 * rank
    # H is the shortest that hides the transfer as the first H did.
    transfer_steps = INTERVAL * bytes_of(now.rank) / bytes_of(FIRST)
    assert transfer_steps <= now.sync_interval < transfer_steps + 1
    sent.append(bytes_of(now.rank))
  assert sent == sorted(sent, reverse=True) and sent[-1] < 0.25 * sent[0]


def test_an_update_that_fills_its_rank_is_given_more_room():
  steered = Policy(RoundSetting(FIRST, INTERVAL), "rank", WINDOW)
  now = RoundSetting(steered.ladder[-1], 8)
  for wider in reversed(steered.ladder[:-1]):
    now = steered.next_setting([now.rank] * WINDOW, bytes_of)
    assert now == RoundSetting(wider, INTERVAL)
  assert steered.next_setting([now.rank], bytes_of) == steered.first
  # The example of the module: a measured mean of 8 needs 8.9.
  sixteen = Policy(RoundSetting(16, 30), "rank", WINDOW)
  assert sixteen.ladder == (16, 10, 6, 3, 2)
  for measured, rank in (([7, 9], 10), ([9, 9], 10), ([9.1], 16)):
    assert sixteen.next_setting(measured, bytes_of).rank == rank
  for rank in (1, 2, 7, 24, 2048):
    ladder = Policy(RoundSetting(rank, INTERVAL)).ladder
    assert (ladder[0], ladder[-1]) == (rank, max(1, rank // 8))
    assert len(ladder) <= 5
    assert list(ladder) == sorted(set(ladder), reverse=True)
  chosen = with_rank(LowRank(9, 2, 9, Int(4)), 5)
  assert chosen == LowRank(5, 2, 9, Int(4))
  assert with_rank(RandomMask(0.5), 5) == RandomMask(0.5)


@pytest.mark.parametrize(
  ("kind", "size", "sent"),
  [
    # By replicas: 1, 2, 3 and 8 of them; a part of a byte counts as one.
    ("all_reduce", 24, (0, 24, 32, 42)),
    ("all_reduce", 10, (0, 10, 14, 18)),
    ("all_gather", 24, (0, 24, 48, 168)),
    ("all_to_all", 24, (0, 12, 16, 21)),
    ("all_to_all", 10, (0, 5, 7, 9)),
    ("broadcast", 12, (0, 12, 12, 12)),
    ("permute", 12, (0, 12, 12, 12)),
    ("mailbox", 12, (0, 12, 12, 12)),
    ("mailbox_shares", 12, (0, 18, 16, 14)),
  ],
)
def test_a_ring_sends_what_its_hops_add_up_to(kind, size, sent):
  ring = operation(kind, size)
  assert tuple(map(ring.sent_bytes, (1, 2, 3, 8))) == sent


def test_steps_behind_an_exchange_are_divided_by_bytes():
  def turns(*sizes):
    return [operation("all_gather", n, turn) for turn, n in enumerate(sizes)]

  ends = stretch_ends([*turns(2_000_000, 1_000_000), *turns(1_000_000)], 2)
  assert ends == (PARTS * 3 // 4, PARTS)
  assert list(stretches(8, ends)) == [6, 2]
  # A single step hides the larger one.
  assert list(stretches(1, ends)) == [1, 0]
  assert sum(stretches(125, ends)) == 125
  # A third of the bytes takes one step of two or three, and not none.
  thirds = stretch_ends(turns(1, 2), 2)
  assert list(stretches(2, thirds)) == [1, 1]
  assert list(stretches(3, thirds)) == [1, 2]
  # Turns without bytes have equal stretches.
  assert list(stretches(10, stretch_ends(turns(1, 2), 1))) == [5, 5]
  assert list(stretches(10, stretch_ends([], 2))) == [10]


@pytest.mark.parametrize("name", OPTIMIZER_OPTIONS)
def test_an_optimizer_has_the_options_that_a_config_may_set_and_no_other(name):
  build = getattr(optax, name, None) or getattr(optax.contrib, name)
  has = set(inspect.signature(build).parameters)
  # Muon calls its momentum beta. It leaves some leaves to AdamW, whose options
  # it takes too.
  has |= {"momentum"} if "beta" in has else set()
  options = ("b1", "b2", "weight_decay", "momentum", "nesterov")
  expected = {o for o in options if o in has or f"adam_{o}" in has}
  assert set(OPTIMIZER_OPTIONS[name]) == expected
