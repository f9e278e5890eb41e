"""Named methods: their settings and rules, and what no plan may be."""

import dataclasses
import functools
import inspect
import re

import pytest

from dilocox_jax.plan.model.division import Division
from dilocox_jax.plan.model.presets import nano
from dilocox_jax.plan.pipeline import Pipeline
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.growing_schedule import GrowingSchedule
from dilocox_jax.plan.schedule.membership import Membership
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
ORDER = "sequential"
MIXED = Method(SyncSchedule(9, 2, 7), "mix", 0.25, fragment_order=ORDER)
# The method with every setting that it has.
MADE = {
  **dict.fromkeys(METHODS, Method(SyncSchedule(9))),
  **dict.fromkeys(
    ("allreduce", "cocktail_sgd"), Method(SyncSchedule(1), exchanged="gradient")
  ),
  **dict.fromkeys(("streaming_diloco", "delayed"), MIXED),
  "eager": Method(SyncSchedule(9, 2, 9), "eager"),
  "dilocox": Method(SyncSchedule(9, 1, 9), "reset"),
  "overlap_loco": Method(
    SyncSchedule(9, 2, 4), "continue", fragment_order=ORDER
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
  assert not has or METHODS[name](sync_interval=8)  # Its defaults go with it.
  for key in every.keys() - has.keys():
    listed = ", ".join(has) or "none"
    message = f"{key}=3 is not a setting of method {name!r} (it has: {listed})"
    with pytest.raises(ValueError, match=re.escape(message)):
      named_method(name, **{key: 3})


def method_of(name="streaming_diloco", **settings):
  return named_method(name, **settings)


# What is planned, with values that go together, and what does not go with them.
REFUSED = {
  method_of: [
    ({"name": "dilco"}, "method='dilco' is not known: did you mean 'dil"),
    ({"name": "dilocox", "rule": "rest"}, "one of reset, continue, mix"),
    *(
      ({"name": name, "num_fragments": 0}, "num_fragments=0 must lie between 1")
      for name in ("overlap_loco", "eager", "streaming_diloco")
    ),
    ({"mixing_alpha": -0.1}, "mixing_alpha=-0.1 must"),
    ({"mixing_alpha": 1.5}, "mixing_alpha=1.5 must"),
    ({"name": "delayed", "mixing_alpha": 0.5}, "alpha=0.5 would be ignored"),
  ],
  functools.partial(SyncSchedule, 4): [
    ({"num_fragments": 5}, "num_fragments=5 must lie between 1 and sync_inter"),
    ({"num_fragments": 0}, "num_fragments=0 must lie between 1 and sync_inter"),
    ({"overlap_steps": -2}, "overlap_steps=-2 must not be negative"),
    ({"num_fragments": 2.0}, "num_fragments=2.0 must be of type int"),
    ({"overlap_steps": 1.5}, "overlap_steps=1.5 must be of type int"),
  ],
  functools.partial(GrowingSchedule, 8, first_interval=2): [
    ({"steps_per_doubling": 4.0}, "steps_per_doubling=4.0 must be of type int"),
  ],
  functools.partial(Method, SyncSchedule(4)): [
    ({"exchanged": "grad"}, "'grad' must be one of pseudo_gradient, gradient"),
    ({"rule": None}, "rule=None must be of type str"),
    ({"rule": "mix", "mixing_alpha": None}, "mixing_alpha=None must be of typ"),
  ],
  Method: [({"schedule": 4}, "schedule=4 must be a SyncSchedule")],
  SyncSchedule: [({"sync_interval": 0}, "sync_interval=0 must be at least 1")],
  functools.partial(Fragments, num_layers=5): [
    ({"num_fragments": 6}, "num_fragments=6 must not exceed num_layers=5"),
    ({"num_fragments": 2, "order": "random"}, "'random' must be one of sequ"),
  ],
  functools.partial(Membership, SyncSchedule(4), 2): [
    ({"absences": ((2, 0, 1),)}, "one of 2 replicas"),
    ({"absences": ((1, 3, 2),)}, "not after the last"),
    ({"absences": ((0, 1, 5), (1, 4, 4))}, "no replica in round 4"),
    ({"inner_steps": (4,)}, "must be 2 numbers"),
    ({"inner_steps": (0, 4)}, "from 1"),
    ({"inner_steps": (3, 3)}, "the largest is 4"),
    ({"inner_steps": (5, 4)}, "to sync_interval=4"),
  ],
  functools.partial(dataclasses.replace, nano): [
    ({"num_layers": 0}, "num_layers=0 must be at least 1"),
    ({"num_heads": 3}, "model_dim=16 must be divisible by num_heads=3"),
    ({"head_dim": -2}, "head_dim=-2 must be at least 0"),
    ({"head_dim": 5}, "head width 5 (head_dim=5"),
    ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=2"),
    ({"num_heads": 16}, "model_dim=16 / num_heads=16) must be even"),
    ({"activation": "selu"}, "activation='selu' must be one of"),
    ({"positions": "learned"}, "does not go with num_positions=0"),
    ({"num_positions": 8}, "positions='rope' does not go with num_positions=8"),
    ({"norm": "batch"}, "norm='batch' must be one of rms, layer"),
    ({"biases": "some"}, "biases='some' must be one of none, qkv, all"),
  ],
  Division: [
    ({"num_data_shards": 0}, "num_data_shards=0 must be at least 1"),
    ({"num_stages": 0}, "num_stages=0 must be at least 1"),
  ],
  functools.partial(dataclasses.replace, Pipeline("gpipe", 2, 2)): [
    ({"name": "pipedream"}, "name='pipedream' must be one of gpipe, 1f1b"),
    ({"num_stages": 0}, "num_stages=0 must be at least 1"),
    ({"num_micro_batches": -1}, "num_micro_batches=-1 must be at least 1"),
  ],
}


@pytest.mark.parametrize(
  ("make", "changes", "message"),
  [(make, *row) for make, rows in REFUSED.items() for row in rows],
)
def test_what_cannot_be_planned_says_which_values_clash(make, changes, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    make(**changes)


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
