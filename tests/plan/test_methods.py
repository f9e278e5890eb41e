"""Named methods: their settings, their rules and their bounds."""

import inspect
import re
from typing import Any

import pytest

from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.methods import METHODS, Method, named_method
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule

# A value for every setting.
SETTINGS = {
  "sync_interval": 9,
  "num_fragments": 2,
  "overlap_steps": 7,
  "mixing_alpha": 0.25,
  "fragment_order": "sequential",
}
ORDER: Any = {"fragment_order": "sequential"}
PLAIN = SyncSchedule(30), Method(SyncSchedule(9))
# The schedule of each method by itself, and the method with every setting.
MADE = {
  **dict.fromkeys(
    ("allreduce", "cocktail_sgd"),
    (SyncSchedule(1), Method(SyncSchedule(1), exchanged="gradient")),
  ),
  **dict.fromkeys(("diloco", "open_diloco", "sparse_loco", "muloco"), PLAIN),
  "streaming_diloco": (
    SyncSchedule(30, 3, 4),
    Method(SyncSchedule(9, 2, 7), "mix", 0.25, **ORDER),
  ),
  "eager": (SyncSchedule(30, 1, 30), Method(SyncSchedule(9, 2, 9), "eager")),
  "dilocox": (SyncSchedule(30, 1, 30), Method(SyncSchedule(9, 1, 9), "reset")),
  "delayed": (
    SyncSchedule(30, 1, 4),
    Method(SyncSchedule(9, 2, 7), "mix", 0.25, **ORDER),
  ),
  "overlap_loco": (
    SyncSchedule(16, 16, 1),
    Method(SyncSchedule(9, 2, 4), "continue", **ORDER),
  ),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_setting_reaches_the_method_and_no_other_is_taken(name):
  has = inspect.signature(METHODS[name]).parameters
  rule = {"dilocox": "reset", "delayed": "mix"}.get(name)
  every = SETTINGS | {"rule": rule}
  settings = {key: value for key, value in every.items() if key in has}
  alone, made = MADE[name]
  assert named_method(name, **settings) == made
  assert named_method(name).schedule == alone
  assert named_method(name, **dict.fromkeys(every)) == METHODS[name]()
  for key in every.keys() - has.keys():
    listed = ", ".join(has) or "none"
    message = f"{key}=3 is not a setting of method {name!r} (it has: {listed})"
    with pytest.raises(ValueError, match=re.escape(message)):
      named_method(name, **{key: 3})


@pytest.mark.parametrize(
  ("name", "settings", "message"),
  [
    ("dilco", {}, "method='dilco' must be one of .*diloco.*overlap_loco"),
    ("dilocox", {"rule": "rest"}, "must be one of reset, continue, mix"),
    *(
      (name, {"num_fragments": 0}, "num_fragments=0 must lie between 1")
      for name in ("overlap_loco", "eager", "streaming_diloco")
    ),
    *(
      (
        "streaming_diloco",
        {"mixing_alpha": alpha},
        f"mixing_alpha={alpha} must",
      )
      for alpha in (-0.1, 1.5)
    ),
  ],
)
def test_what_no_method_has_is_refused(name, settings, message):
  with pytest.raises(ValueError, match=message):
    named_method(name, **settings)


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


def test_another_interval_keeps_no_delay_or_a_whole_round_of_it():
  for method, overlap in ((methods.diloco(12), 0), (methods.dilocox(12), 5)):
    shorter = methods.with_interval(method, 5)
    assert shorter.schedule == SyncSchedule(5, 1, overlap)
    assert methods.with_interval(shorter, 12) == method
  for method in (methods.streaming_diloco(30, 3, 0), methods.delayed(12, 1, 3)):
    with pytest.raises(ValueError, match="only with one fragment and no delay"):
      methods.with_interval(method, 5)
