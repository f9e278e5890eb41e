"""The outer parameters of a checkpoint, read leaf by leaf."""

from typing import Any

import jax
import numpy as np
import pytest

from dilocox_jax.models.loss import LossModel
from dilocox_jax.training import start
from dilocox_jax.training.checkpoint import RefusedError, SavedArray
from dilocox_jax.training.overrides import Overrides
from dilocox_jax.trees import leaves_by_path
from tests import runs

TINY: Any = runs.TINY.model


def init(key):
  """The model `runs.TINY` with three layers, which fragments cannot halve."""
  params = TINY.init(key)
  kernels = jax.random.normal(key, (3, 8, 8))
  return params | {"blocks": {"kernel": kernels}}


THREE_LAYERS = Overrides(model=LossModel(init, TINY.loss))
STREAMING = {
  "method": "streaming_diloco",
  "num_fragments": 3,
  "overlap_steps": 1,
}
AVERAGE = {"average_power": 2.0, "learning_rate": 1.0, "momentum": 0.0}
SETTINGS = {
  "whole": {"method": "diloco"},
  "average": {"method": "diloco", "outer": AVERAGE},
  "layers": STREAMING,
  "slices": STREAMING | {"fragment_order": "interleaved"},
  "personal": {"method": "eager"},
  "shared steps": {
    "method": "allreduce",
    "sync_interval": None,
    "steps_per_dispatch": 3,
  },
}


@pytest.fixture(scope="module", name="workdir")
def workdir_fixture(tmp_path_factory):
  """A function from a name of `SETTINGS` to a run that saved step 6."""

  def trained(name):
    workdir = tmp_path_factory.mktemp("run")
    config = runs.settings(
      total_steps=12, model={"num_layers": 3}, **SETTINGS[name]
    )
    runs.train(config, workdir, until=6, overrides=THREE_LAYERS)
    return workdir

  return trained


@pytest.mark.parametrize("name", SETTINGS)
def test_leaves_are_those_of_the_whole_outer_parameters(
  name, workdir, monkeypatch
):
  run = workdir(name)
  expected = start.saved_outer_params(run, THREE_LAYERS)
  num_read = []
  plain_read = SavedArray.read

  def read(self):
    array = plain_read(self)
    num_read.append(array.size)
    return array

  monkeypatch.setattr(SavedArray, "read", read)
  leaves = start.saved_leaves(run, THREE_LAYERS)
  assert not num_read
  runs.assert_same_bits(jax.tree.map(np.asarray, leaves), expected)
  num_values = sum(leaf.size for leaf in jax.tree.leaves(expected))
  if name in ("whole", "average", "shared steps"):
    assert sum(num_read) == num_values
  # Fragments are padded, and two replicas have parameters of their own.
  assert sum(num_read) <= 2.5 * num_values


def test_an_array_that_the_checkpoint_lacks_is_one_line(workdir):
  leaves = start.saved_leaves(workdir("whole"), THREE_LAYERS)
  saved = leaves_by_path(leaves)["table"].parts[0]
  for changed in (
    SavedArray(saved.folder, "0009['x']", saved.shape, saved.dtype),
    SavedArray(saved.folder, saved.name, (3, 8), saved.dtype),
  ):
    with pytest.raises(RefusedError, match="pass the same model") as error:
      changed.read()
    assert "\n" not in str(error.value)
