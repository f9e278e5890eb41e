"""Replicas stacked on one device and on a device each train alike."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dilocox_jax.plan.schedule.methods import METHODS
from tests.outer import nano

SAME = 1e-5  # fp32; the two layouts sum in different orders
INTERVAL = 4
ROUNDS = 3

CASES = {
  "diloco": {"method": "diloco"},
  "open_diloco": {"method": "open_diloco"},
  "streaming_diloco": {
    "method": "streaming_diloco",
    "num_fragments": 3,
    "overlap_steps": 1,
  },
  "eager": {"method": "eager"},
  "dilocox_continue": {"method": "dilocox", "rule": "continue"},
  "dilocox_reset": {"method": "dilocox", "rule": "reset"},
  "delayed": {"method": "delayed", "overlap_steps": 6, "rule": "continue"},
  "overlap_loco": {"method": "overlap_loco", "num_fragments": 3},
}
# What one of the layouts does is in the fast tier (test_divided_runs.py).
SLOW = (
  "diloco",
  "open_diloco",
  "streaming_diloco",
  "eager",
  "dilocox_reset",
  "dilocox_continue",
  "delayed",
  "overlap_loco",
)


def train(layout, settings, num_replicas=3):
  config = nano.config(
    num_steps=ROUNDS * INTERVAL,
    num_replicas=num_replicas,
    layout=layout,
    model={"num_layers": 3},
    **settings,
  )
  return nano.train(config)


def assert_same(actual, expected):
  def same(a, b):
    np.testing.assert_allclose(a, b, rtol=SAME, atol=SAME)

  # Compared on the host: the two layouts own different devices.
  jax.tree.map(same, jax.device_get(actual), jax.device_get(expected))


def assert_placed(tree, spec, mesh):
  for leaf in jax.tree.leaves(tree):
    assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), leaf.ndim)


def assert_copies_are_equal(tree):
  for leaf in jax.tree.leaves(tree):
    first, *others = [np.asarray(x.data) for x in leaf.addressable_shards]
    assert others
    for other in others:
      np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
    for name in CASES
  ],
)
def test_both_layouts_train_alike(name):
  settings = {**CASES[name], "sync_interval": INTERVAL}
  programs, on_mesh, seen = train("mesh", settings)
  stacked_programs, stacked, stacked_seen = train("stacked", settings)
  assert_same(on_mesh, stacked)
  assert_same(seen, stacked_seen)
  mesh = programs.rounds.replicas.mesh
  across, everywhere = PartitionSpec("replica"), PartitionSpec()
  is_shared = programs.rounds.outer.is_shared
  assert_placed(on_mesh.replica, across, mesh)
  assert_placed([each.in_flight for each in on_mesh.fragments], across, mesh)
  shared = [(each.params, each.optimizer) for each in on_mesh.fragments]
  assert_placed(shared, everywhere if is_shared else across, mesh)
  if is_shared:
    assert_copies_are_equal(shared)
  flushed, _ = programs.rounds.flush(on_mesh)
  expected, _ = stacked_programs.rounds.flush(stacked)
  assert_same(flushed, expected)
  evaluated = programs.rounds.outer_params(flushed)
  assert_same(evaluated, stacked_programs.rounds.outer_params(expected))


def test_both_layouts_average_every_step_alike():
  programs, on_mesh, seen = train("mesh", {"method": "allreduce"}, 4)
  _, stacked, stacked_seen = train("stacked", {"method": "allreduce"}, 4)
  assert_same(on_mesh, stacked)
  assert_same(seen, stacked_seen)
  assert_placed(on_mesh, PartitionSpec(), programs.steps.replicas.mesh)
  assert_copies_are_equal(on_mesh)


def test_every_named_method_is_compared():
  compared = {settings["method"] for settings in CASES.values()}
  distinct = {METHODS[name]() for name in METHODS if name != "allreduce"}
  named = {METHODS[name]() for name in compared}
  assert distinct - named == {METHODS["allreduce"]()}
