"""The settings that the adviser compares."""

from typing import Any

from dilocox_jax.api.candidates import (
  COMPARED_METHODS,
  at_interval,
  changed,
  families,
  layouts,
)
from dilocox_jax.config import RunConfig, from_mapping


def test_every_method_has_settings_that_are_valid():
  config = RunConfig()
  found = set()
  for changes, intervals in families(config):
    if intervals:
      changes = at_interval(changes, intervals[0])
    # Four layers cannot be cut into eight fragments.
    if one := changed(config, changes):
      found.add(one.sync.method)
  assert found == set(COMPARED_METHODS)


def test_what_the_user_said_of_a_method_is_left_out():
  config = from_mapping(
    {
      "sync": {"method": "muloco"},
      "outer": {"momentum": 0.3},
      "inner": {"learning_rate": 0.004},
    }
  )
  one: Any = changed(config, {"sync.method": "diloco"})
  assert one.inner.optimizer == "adamw" and one.outer.momentum == 0.6
  assert one.inner.learning_rate == 0.004


def test_settings_that_do_not_go_together_are_none():
  changes = {"sync.method": "diloco", "sync.overlap_steps": 3}
  assert changed(RunConfig(), changes) is None


def test_layouts_use_all_devices_and_divide_the_batch():
  found = list(layouts(RunConfig(), 4))  # Eight sequences, four layers.
  sizes = {(x["mesh.num_stages"], x["mesh.num_data_shards"]) for x in found}
  assert sizes == {(1, 4), (2, 2), (4, 1)}
  assert max(x["inner.accumulate_steps"] for x in found) == 8
  assert all(changed(RunConfig(), layout) for layout in found)
  assert list(layouts(RunConfig(), 1)) == [{}]


def test_an_outer_step_is_the_one_whose_gap_was_measured():
  changes = at_interval({"sync.method": "open_diloco"}, 4)
  one: Any = changed(RunConfig(), changes)
  assert (one.outer.learning_rate, one.outer.momentum) == (0.7, 0.0)
