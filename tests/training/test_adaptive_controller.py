import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.config import from_mapping
from dilocox_jax.outer.drift import Drift
from dilocox_jax.plan.adaptive import Policy, RoundSetting
from dilocox_jax.training.adaptive_controller import AdaptiveController
from tests import runs

INTERVAL = 8
RANK = 6
WINDOW = 2


def config(method="dilocox", mode="rank_and_interval"):
  return from_mapping(
    {
      "total_steps": 100,
      "model": {"preset": "nano", "model_dim": 32, "ff_dim": 48},
      "inner": {"warmup_steps": 5},
      "sync": {"method": method, "sync_interval": INTERVAL},
      "exchange": {"codec": f"low_rank(rank={RANK})+int"},
      "adaptive": {"mode": mode}
      | ({"window_rounds": WINDOW} if mode != "off" else {}),
    }
  )


def controller(**kwargs):
  return AdaptiveController(runs.programs(config(**kwargs)))


def measured(settings, rank, room=RANK):
  """What a round reports whose updates have so many directions."""
  gram = np.diag((np.arange(room) < rank).astype(np.float32))
  shapes = settings.model.shape.parameter_shapes
  matrices = [k for k, s in shapes.items() if len(s) - ("blocks" in k) == 2]
  grams: Any = {k: np.tile(gram, (len(matrices), 1, 1)) for k in matrices}
  own: Any = np.ones(2)
  return [Drift(own, own, own[0], grams)]


def fly(steered, ranks):
  """Runs rounds of which only the measurements are real."""
  segments = []
  step = 0
  for rank in ranks:
    segment = steered.plan.segment(step)
    segments.append(segment)
    steered.observe(measured(config(), rank, steered.setting.rank))
    if steered.is_choice_due():
      steered.choose_setting(segment)
    step = segment.stop
  return segments


@pytest.mark.parametrize("method", ["dilocox", "diloco"])
def test_it_is_known_before_it_ends_which_segment_fills_the_window(method):
  steered = controller(method=method)
  step = 0
  turns = []
  for _ in range(3 * WINDOW + 1):
    segment = steered.plan.segment(step)
    may_turn = steered.is_choice_due(segment)
    if any(window.applied for window in segment.windows):
      steered.observe(measured(config(), RANK, steered.setting.rank))
    assert may_turn == steered.is_choice_due()
    if may_turn:
      steered.choose_setting(segment)
    turns.append(may_turn)
    step = segment.stop
  assert turns.count(True) == 3
  assert not controller(mode="off").is_choice_due(segment)


@pytest.mark.parametrize("method", ["dilocox", "diloco"])
def test_rounds_grow_shorter_with_the_rank(method):
  steered = controller(method=method)
  segments = fly(steered, [1] * 6)
  lengths = [segment.num_steps for segment in segments]
  assert lengths[:WINDOW] == [INTERVAL] * WINDOW
  assert lengths[WINDOW] < INTERVAL
  assert steered.setting.rank == 2  # There is room to see a second direction.
  for before, after in zip(segments, segments[1:], strict=False):
    assert before.stop == after.start


def test_a_shorter_round_applies_what_the_longer_one_sent():
  segments = fly(controller(), [1] * 5)
  for before, after in zip(segments, segments[1:], strict=False):
    (sent,) = [w.sent for w in before.windows if w.sent]
    (arrived,) = [w.applied for w in after.windows if w.applied]
    assert before.schedule_start + sent.send_step == before.stop
    assert after.schedule_start + arrived.send_step == before.stop
    assert after.schedule_start + arrived.step == after.stop


def test_a_controller_that_was_replaced_chooses_as_the_old_one():
  ranks = [1, 2, 1, 6, 6, 6, 3, 3, 2]
  whole = controller()
  fly(whole, ranks)
  halves = controller()
  for number, rank in enumerate(ranks):
    fly_on = controller()
    fly_on.set_state(json.loads(json.dumps(halves.get_state())))
    step = sum_of_steps(fly_on, number)
    segment = fly_on.plan.segment(step)
    fly_on.observe(measured(config(), rank, fly_on.setting.rank))
    if fly_on.is_choice_due():
      fly_on.choose_setting(segment)
    halves = fly_on
  assert halves.setting == whole.setting
  assert halves.get_state()["measured"] == whole.get_state()["measured"]


def test_a_choice_changes_the_rank_and_the_interval_everywhere():
  programs = runs.programs(config())
  first = RoundSetting(RANK, INTERVAL)
  assert programs.policy == Policy(first, "rank_and_interval", WINDOW)
  assert programs.traffic.codec == LowRank(RANK, max_rank=RANK, then=Int())
  given: Any = {"aggregator_of": lambda codec: codec}
  steered = AdaptiveController(dataclasses.replace(programs, **given))
  steered.setting = RoundSetting(rank=2, sync_interval=5)
  outer = steered.rounds.outer
  traffic = steered.traffic
  schedule = outer.method.schedule
  assert (schedule.sync_interval, schedule.overlap_steps) == (5, 5)
  assert steered.plan.method == traffic.method == outer.method
  # States keep room for the first rank.
  assert traffic.codec == LowRank(2, max_rank=RANK, then=Int())
  assert outer.aggregator == traffic.codec


def sum_of_steps(steered, number):
  """A step at which a segment may begin."""
  start = steered.plan.schedule_start or 0
  return start + steered.setting.sync_interval * max(1, number)


def test_a_model_that_is_passed_in_has_its_own_leaves():
  programs = runs.programs(config())
  kernel = dataclasses.replace(programs.traffic, shapes={"kernel": (40, 60)})
  steered = AdaptiveController(dataclasses.replace(programs, traffic=kernel))
  gram: Any = np.diag((np.arange(RANK) < 2).astype(np.float32))[None]
  own: Any = np.ones(2)
  for _ in range(WINDOW):
    steered.observe([Drift(own, own, own[0], {"kernel": gram})])
  steered.choose_setting(steered.plan.segment(0))
  # Rank 2 and a little room: fewer bytes than rank 6, so shorter rounds.
  assert 2 <= steered.setting.rank < RANK
  assert steered.setting.sync_interval < INTERVAL
