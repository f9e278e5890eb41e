"""Ranks and H of adaptive runs, collectives, and names that are chosen."""

import inspect
import json

import numpy as np
import optax
import optax.contrib
import pytest

from dilocox_jax.aggregators.collectives import message_bytes
from dilocox_jax.codecs.low_rank import LowRank, with_rank
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.codecs.sparse import RandomMask, TopK
from dilocox_jax.plan.adaptive import Policy, RoundSetting
from dilocox_jax.plan.choices import (
  OPTIMIZER_OPTIONS,
  Registry,
  check_lazy,
  loaded,
)
from dilocox_jax.plan.collective import (
  PARTS,
  Collective,
  stretch_ends,
  stretches,
)
from dilocox_jax.plan.ranks import (
  energy_rank,
  mean_rank,
  spectra_of,
  stable_rank,
)


def flat(rank, width, num_matrices=2):
  """Spectra of matrices with equal directions."""
  spectrum = np.zeros((num_matrices, width))
  spectrum[:, :rank] = 3.0
  return spectrum


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_equal_directions_are_counted_by_both_measures(rank):
  assert energy_rank(flat(rank, 8), 1.0) == rank
  assert stable_rank(flat(rank, 8)) == rank


def test_the_energy_rank_holds_its_share_and_no_fewer_directions_do():
  spectrum = np.array([[8.0, 4.0, 2.0, 1.0, 1.0]])
  assert [energy_rank(spectrum, s) for s in (0.5, 0.51, 0.75, 0.9, 1.0)] == [
    1,
    2,
    2,
    4,
    5,
  ]
  assert stable_rank(spectrum) == 2.0


def test_matrices_without_energy_have_rank_zero():
  spectrum = np.stack([flat(4, 8)[0], np.zeros(8)])
  assert energy_rank(spectrum, 0.9) == 2
  assert stable_rank(spectrum) == 2


def test_leaves_count_by_their_matrices():
  spectra = {"one": flat(2, 8, 1), "three": flat(6, 8, 3)}
  for rank_of in lambda each: energy_rank(each, 1.0), stable_rank:
    assert mean_rank(spectra, rank_of) == 5


def test_factors_give_the_spectrum_of_what_they_multiply_to():
  rng = np.random.default_rng(0)
  right = rng.normal(size=(2, 7, 3))
  basis = np.stack([np.linalg.qr(rng.normal(size=(9, 3)))[0]] * 2)
  padded = np.zeros((3, 5, 5))  # The last layer fills a fragment up.
  padded[:2, :3, :3] = right.transpose(0, 2, 1) @ right
  found = spectra_of({"w": padded, "unsent": np.zeros((3, 5, 5))})
  assert found.keys() == {"w"}
  values = np.linalg.svd(basis @ right.transpose(0, 2, 1), compute_uv=False)
  np.testing.assert_allclose(found["w"], values[:, :3] ** 2, rtol=1e-12)


FIRST, INTERVAL, WINDOW = 32, 64, 5
SHAPES = {"w": (256, 256), "blocks/w": (4, 128, 512)}


def bytes_of(rank):
  return message_bytes(LowRank(rank, then=Int(4)), SHAPES)


def policy(adapts_interval=True):
  return Policy(RoundSetting(FIRST, INTERVAL), WINDOW, adapts_interval)


def test_rank_and_interval_follow_an_update_whose_rank_falls():
  steered, now, sent = policy(), RoundSetting(FIRST, INTERVAL), []
  for rank in (32, 32, 16, 16, 8, 8, 4, 4, 4):
    spectrum = np.full((1, FIRST), 1e-4)  # And a little of everything else.
    spectrum[:, :rank] = 1
    # What is sent shows no more directions than it has room for.
    seen = energy_rank(spectrum[:, : now.rank], 0.95)
    now = steered.next_setting([seen] * WINDOW, bytes_of)
    assert rank <= now.rank <= 2 * rank
    # H is the shortest that hides the transfer as the first H did.
    transfer_steps = INTERVAL * bytes_of(now.rank) / bytes_of(FIRST)
    assert transfer_steps <= now.sync_interval < transfer_steps + 1
    sent.append(bytes_of(now.rank))
  assert sent == sorted(sent, reverse=True) and sent[-1] < 0.25 * sent[0]


def test_an_update_that_fills_its_rank_is_given_more_room():
  steered = policy(adapts_interval=False)
  ladder = steered.ladder
  now = RoundSetting(ladder[-1], 8)
  for wider in reversed(ladder[:-1]):
    now = steered.next_setting([now.rank] * WINDOW, bytes_of)
    assert now == RoundSetting(wider, INTERVAL)
  assert steered.next_setting([now.rank], bytes_of) == steered.first
  # The example of the module: a measured mean of 8 needs 8.9.
  sixteen = Policy(RoundSetting(16, 30), WINDOW)
  assert sixteen.ladder == (16, 10, 6, 3, 2)
  assert sixteen.next_setting([7, 9], bytes_of).rank == 10
  assert sixteen.next_setting([9, 9], bytes_of).rank == 10
  assert sixteen.next_setting([9.1], bytes_of).rank == 16


@pytest.mark.parametrize("rank", [1, 2, 7, 24, 2048])
def test_a_ladder_is_short_and_begins_at_the_first_rank(rank):
  ladder = Policy(RoundSetting(rank, INTERVAL)).ladder
  assert (ladder[0], ladder[-1]) == (rank, max(1, rank // 8))
  assert len(ladder) <= 5
  assert list(ladder) == sorted(set(ladder), reverse=True)


def test_a_chosen_rank_replaces_that_of_the_codec():
  chosen = with_rank(LowRank(9, 2, then=Int(4)), 5, 9)
  assert chosen == LowRank(5, 2, 9, Int(4))
  other = RandomMask(0.5, then=TopK(0.1, then=Int(2)))
  assert with_rank(other, 5, 9) == other


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
  ],
)
def test_a_ring_sends_what_its_hops_add_up_to(kind, size, sent):
  operation = Collective(kind, size)
  assert tuple(map(operation.sent_bytes, (1, 2, 3, 8))) == sent


def test_steps_behind_an_exchange_are_divided_by_bytes():
  operations = [
    Collective("all_gather", 2_000_000),
    Collective("all_gather", 1_000_000),
    Collective("all_gather", 1_000_000, 1),
  ]
  ends = stretch_ends(operations, 2)
  assert ends == (PARTS * 3 // 4, PARTS)
  assert list(stretches(8, ends)) == [6, 2]
  # A single step hides the larger one.
  assert list(stretches(1, ends)) == [1, 0]
  assert sum(stretches(125, ends)) == 125
  # A third of the bytes takes one step of two or three, and not none.
  thirds = stretch_ends(
    [Collective("all_gather", 1), Collective("all_gather", 2, 1)], 2
  )
  assert list(stretches(2, thirds)) == [1, 1]
  assert list(stretches(3, thirds)) == [1, 2]
  # Turns without bytes have equal stretches.
  assert list(stretches(10, stretch_ends(operations, 1))) == [5, 5]
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


def test_a_registry_refuses_a_name_that_is_taken_or_is_none():
  parts = Registry("part")
  parts.add("one", 1)
  with pytest.raises(ValueError, match="part 'one' is registered already"):
    parts.add("one", 2)
  with pytest.raises(ValueError, match="part 'a b': a name has letters"):
    parts.add("a b", 3)
  assert dict(parts) == {"one": 1}
  assert loaded("json:dumps") is loaded(json.dumps) is json.dumps
  for reference in ("json.dumps", None):
    with pytest.raises(ValueError, match="build=.* must be a function or its"):
      check_lazy("build", reference)
