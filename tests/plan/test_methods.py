import inspect
import re

import pytest

from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.methods import METHODS, Method, named_method
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule

# A value for every setting, and the method that has them.
SETTINGS = {
  "sync_interval": 9,
  "num_fragments": 2,
  "overlap_steps": 7,
  "mixing_alpha": 0.25,
  "fragment_order": "sequential",
}
MADE = {
  "allreduce": Method(SyncSchedule(1), exchanged="gradient"),
  "cocktail_sgd": Method(SyncSchedule(1), exchanged="gradient"),
  "diloco": Method(SyncSchedule(9)),
  "open_diloco": Method(SyncSchedule(9)),
  "sparse_loco": Method(SyncSchedule(9)),
  "muloco": Method(SyncSchedule(9)),
  "streaming_diloco": Method(
    SyncSchedule(9, 2, 7), "mix", 0.25, fragment_order="sequential"
  ),
  "eager": Method(SyncSchedule(9, 2, 9), "eager"),
  "dilocox": Method(SyncSchedule(9, 1, 9), "reset"),
  "delayed": Method(
    SyncSchedule(9, 2, 7), "mix", 0.25, fragment_order="sequential"
  ),
  "overlap_loco": Method(
    SyncSchedule(9, 2, 4), "continue", fragment_order="sequential"
  ),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_reaches_the_method_and_no_other_is_taken(name):
  has = inspect.signature(METHODS[name]).parameters
  rule = {"dilocox": "reset", "delayed": "mix"}.get(name)
  every = SETTINGS | {"rule": rule}
  settings = {key: value for key, value in every.items() if key in has}
  assert named_method(name, **settings) == MADE[name]
  assert named_method(name, **dict.fromkeys(every)) == METHODS[name]()
  for key in every.keys() - has.keys():
    listed = ", ".join(has) or "none"
    message = f"{key}=3 is not a setting of method {name!r} (it has: {listed})"
    with pytest.raises(ValueError, match=re.escape(message)):
      named_method(name, **{key: 3})


# By themselves: H, P and tau with the rule.
PAPERS = {
  **dict.fromkeys(("allreduce", "cocktail_sgd"), (1, 1, 0, "reset")),
  **dict.fromkeys(("diloco", "open_diloco"), (30, 1, 0, "reset")),
  **dict.fromkeys(("sparse_loco", "muloco"), (30, 1, 0, "reset")),
  "streaming_diloco": (30, 3, 4, "mix"),
  "eager": (30, 1, 30, "eager"),
  "dilocox": (30, 1, 30, "continue"),
  "delayed": (30, 1, 4, "continue"),
  "overlap_loco": (16, 16, 1, "continue"),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_by_itself_is_that_of_its_paper(name):
  *schedule, rule = PAPERS[name]
  found = named_method(name)
  assert (found.schedule, found.rule) == (SyncSchedule(*schedule), rule)
  assert found.mixing_alpha == (0.5 if rule == "mix" else 0.0)
  is_sliced = name == "overlap_loco"
  assert found.fragment_order == ("sliced" if is_sliced else "strided")


def test_unknown_names_are_answered_with_those_there_are():
  with pytest.raises(ValueError, match="method='dilco'") as caught:
    named_method("dilco")
  assert all(name in str(caught.value) for name in METHODS)
  with pytest.raises(ValueError, match="must be one of reset, continue, mix"):
    methods.dilocox(rule="rest")
  for name in ("overlap_loco", "eager", "streaming_diloco"):
    with pytest.raises(ValueError, match="num_fragments=0 must lie between 1"):
      named_method(name, num_fragments=0)


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
    method = Method(SyncSchedule(5, 1, overlap_steps), rule)
    keeps = rule == "continue" or (rule == "reset" and not overlap_steps)
    assert method.can_keep_unsent == keeps
  for overlap in refused:
    message = f"overlap_steps={overlap} must .*sync_interval=5"
    with pytest.raises(ValueError, match=message):
      Method(SyncSchedule(5, 1, overlap), rule)
  assert not methods.allreduce().can_keep_unsent


@pytest.mark.parametrize("alpha", [-0.1, 1.5])
def test_mixing_weights_lie_between_zero_and_one(alpha):
  with pytest.raises(ValueError, match=f"mixing_alpha={alpha} must be at"):
    methods.streaming_diloco(mixing_alpha=alpha)
  assert methods.streaming_diloco(mixing_alpha=1.0).mixing_alpha == 1


@pytest.mark.parametrize("method", [methods.diloco(12), methods.dilocox(12)])
def test_another_interval_keeps_no_delay_or_a_whole_round_of_it(method):
  shorter = methods.with_interval(method, 5)
  expected = 5 if method.schedule.overlap_steps else 0
  assert shorter.schedule == SyncSchedule(5, 1, expected)
  assert methods.with_interval(shorter, 12) == method


@pytest.mark.parametrize(
  "method", [methods.streaming_diloco(30, 3, 0), methods.delayed(12, 1, 3)]
)
def test_an_interval_that_events_depend_on_cannot_change(method):
  with pytest.raises(ValueError, match="only with one fragment and no delay"):
    methods.with_interval(method, 5)
