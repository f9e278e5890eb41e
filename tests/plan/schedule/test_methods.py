import inspect
import re

import pytest

from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.methods import METHODS, Method, named_method
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule


def test_methods_are_the_schedules_and_rules_of_their_papers():
  expected = {
    "allreduce": Method(SyncSchedule(1, 1, 0), exchanged="gradient"),
    "diloco": Method(SyncSchedule(30, 1, 0), "reset"),
    "open_diloco": Method(SyncSchedule(30, 1, 0), "reset"),
    "sparse_loco": Method(SyncSchedule(30, 1, 0), "reset"),
    "muloco": Method(SyncSchedule(30, 1, 0), "reset"),
    "cocktail_sgd": Method(SyncSchedule(1), "reset", exchanged="gradient"),
    "streaming_diloco": Method(SyncSchedule(30, 3, 4), "mix", 0.5),
    "eager": Method(SyncSchedule(30, 1, 30), "eager"),
    "dilocox": Method(SyncSchedule(30, 1, 30), "continue"),
    "delayed": Method(SyncSchedule(30, 1, 4), "continue"),
    "overlap_loco": Method(
      SyncSchedule(16, 16, 1), "continue", fragment_order="sliced"
    ),
  }
  assert {name: named_method(name) for name in METHODS} == expected


@pytest.mark.parametrize(
  ("name", "settings", "expected"),
  [
    ("diloco", {"sync_interval": 7}, Method(SyncSchedule(7))),
    ("open_diloco", {"sync_interval": 500}, Method(SyncSchedule(500))),
    (
      "streaming_diloco",
      {
        "sync_interval": 8,
        "num_fragments": 2,
        "overlap_steps": 7,
        "mixing_alpha": 0.25,
        "fragment_order": "sequential",
      },
      Method(SyncSchedule(8, 2, 7), "mix", 0.25, fragment_order="sequential"),
    ),
    (
      "eager",
      {"sync_interval": 6, "num_fragments": 2},
      Method(SyncSchedule(6, 2, 6), "eager"),
    ),
    (
      "dilocox",
      {"sync_interval": 9, "rule": "reset"},
      Method(SyncSchedule(9, 1, 9), "reset"),
    ),
    (
      "overlap_loco",
      {
        "sync_interval": 15,
        "num_fragments": 2,
        "fragment_order": "interleaved",
      },
      Method(SyncSchedule(15, 2, 7), "continue", fragment_order="interleaved"),
    ),
    (
      "delayed",
      {
        "sync_interval": 6,
        "num_fragments": 3,
        "overlap_steps": 2,
        "rule": "mix",
        "mixing_alpha": 0.75,
        "fragment_order": "sequential",
      },
      Method(SyncSchedule(6, 3, 2), "mix", 0.75, fragment_order="sequential"),
    ),
  ],
)
def test_every_setting_reaches_the_method(name, settings, expected):
  assert set(settings) == set(inspect.signature(METHODS[name]).parameters)
  assert named_method(name, **settings) == expected


def test_a_setting_of_none_leaves_the_default():
  unset = named_method("dilocox", sync_interval=None, num_fragments=None)
  assert unset == methods.dilocox()


@pytest.mark.parametrize(
  ("name", "setting", "has"),
  [
    ("allreduce", "sync_interval", "none"),
    ("diloco", "overlap_steps", "sync_interval"),
    ("dilocox", "overlap_steps", "sync_interval, rule"),
    ("eager", "mixing_alpha", "sync_interval, num_fragments"),
  ],
)
def test_a_setting_that_a_method_has_not_is_refused(name, setting, has):
  message = f"{setting}=3 is not a setting of method {name!r} (it has: {has})"
  with pytest.raises(ValueError, match=re.escape(message)):
    named_method(name, **{setting: 3})


def test_an_unknown_method_is_answered_with_those_there_are():
  with pytest.raises(ValueError) as caught:
    named_method("dilco")
  assert "method='dilco'" in str(caught.value)
  assert all(name in str(caught.value) for name in METHODS)


@pytest.mark.parametrize("name", ["overlap_loco", "eager", "streaming_diloco"])
def test_no_fragments_at_all_are_one_line(name):
  with pytest.raises(ValueError, match="num_fragments=0 must lie between 1"):
    named_method(name, num_fragments=0)


def method(rule, overlap_steps):
  return Method(SyncSchedule(5, 1, overlap_steps), rule)


@pytest.mark.parametrize(
  ("rule", "allowed", "refused"),
  [
    ("mix", [0, 4], [5, 6]),
    ("reset", [0, 4, 5], [6, 11]),
    ("eager", [5], [0, 4, 6, 10]),
    ("continue", [0, 4, 5, 6, 11], []),
  ],
)
def test_every_rule_has_its_bounds_on_the_overlap(rule, allowed, refused):
  for overlap_steps in allowed:
    assert method(rule, overlap_steps).rule == rule
  for overlap_steps in refused:
    with pytest.raises(ValueError) as caught:
      method(rule, overlap_steps)
    assert f"overlap_steps={overlap_steps} must" in str(caught.value)
    assert "sync_interval=5" in str(caught.value)


def test_streaming_refuses_a_delay_of_a_whole_interval():
  message = "overlap_steps=30 must be less than sync_interval=30"
  with pytest.raises(ValueError, match=re.escape(message)):
    methods.streaming_diloco(overlap_steps=30)


@pytest.mark.parametrize("alpha", [-0.1, 1.5])
def test_mixing_weights_lie_between_zero_and_one(alpha):
  with pytest.raises(ValueError, match=f"mixing_alpha={alpha} must be at"):
    methods.streaming_diloco(mixing_alpha=alpha)
  assert methods.streaming_diloco(mixing_alpha=1.0).mixing_alpha == 1
  assert methods.streaming_diloco(mixing_alpha=0.0).mixing_alpha == 0


def test_an_unknown_rule_is_answered_with_those_there_are():
  message = "rule='rest' must be one of reset, continue, mix, eager"
  with pytest.raises(ValueError, match=re.escape(message)):
    methods.dilocox(rule="rest")


@pytest.mark.parametrize("method", [methods.diloco(12), methods.dilocox(12)])
def test_another_interval_keeps_no_delay_or_a_whole_round_of_it(method):
  shorter = methods.with_interval(method, 5)
  expected = 5 if method.schedule.overlap_steps else 0
  assert shorter.schedule == SyncSchedule(5, 1, expected)
  assert methods.with_interval(shorter, 12) == method


@pytest.mark.parametrize(
  "method", [methods.streaming_diloco(), methods.delayed(12, 1, 3)]
)
def test_an_interval_that_events_depend_on_cannot_change(method):
  with pytest.raises(ValueError, match="only with one fragment and no delay"):
    methods.with_interval(method, 5)
