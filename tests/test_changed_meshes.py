"""A run goes on, or another starts, on devices that are divided otherwise."""

import dataclasses

import numpy as np
import pytest

from dilocox_jax.config.sections import MeshConfig
from dilocox_jax.training import evaluation, resume, start
from dilocox_jax.training.checkpoint import Checkpoints
from tests import runs

pytestmark = pytest.mark.slow  # All start from one run on a mesh: a minute.

SAVED_AT = 12
SAME_LOSS = 1e-6  # fp32; sums run in another order
LAYERS = {"num_layers": 4}

ONE_DEVICE = MeshConfig()
MESHES = {
  "one stage": MeshConfig(layout="mesh"),
  "two data shards": MeshConfig(layout="mesh", num_data_shards=2),
  "four stages": MeshConfig(layout="mesh", num_stages=4),
  "interleaved": MeshConfig(
    layout="mesh", num_stages=2, pipeline="interleaved", chunks_per_stage=2
  ),
  "stacked": ONE_DEVICE,
}


def config_on(mesh, **changes):
  """A run with everything that a checkpoint can hold."""
  config = runs.settings(
    model=LAYERS,
    inner={"accumulate_steps": 2},
    data={"batch_size": 4},
    exchange={"codec": "low_rank(rank=2)+int", "feedback": 1.0},
    **changes,
  )
  return dataclasses.replace(config, mesh=mesh)


@pytest.fixture(scope="module", name="source")
def source_fixture(tmp_path_factory):
  """A run of two replicas, two stages each, that was killed after a save."""
  workdir = tmp_path_factory.mktemp("source")
  config = config_on(MeshConfig(layout="mesh", num_stages=2))
  runs.train(config, workdir, until=SAVED_AT)
  return workdir


def losses_before(source):
  (row,) = [
    row for row in runs.rows(source, "evaluation") if row["step"] == SAVED_AT
  ]
  return row


def resumed(config, workdir):
  made = runs.trainer(config, workdir)
  checkpoints = Checkpoints(workdir / "checkpoints", read_only=True)
  try:
    found = resume.resumed_state(
      config, made.programs, checkpoints, made.data.digest
    )
  finally:
    checkpoints.close()
  assert found
  return made, found[0]


@pytest.mark.parametrize("name", MESHES)
def test_a_run_goes_on_with_the_same_losses_on_other_devices(source, name):
  made, state = resumed(config_on(MESHES[name]), source)
  seen = evaluation.losses(made.programs, state, made.data.validation)
  before = losses_before(source)
  for view in ("outer_loss", "mean_loss", "replica_loss"):
    np.testing.assert_allclose(seen[view], before[view], atol=SAME_LOSS, rtol=0)


@pytest.mark.parametrize("name", ["four stages", "stacked"])
def test_every_saved_bit_arrives_on_other_devices(source, name):
  _, state = resumed(config_on(MESHES[name]), source)
  old, _ = runs.saved(source)
  runs.assert_same_bits(state, old)


def test_more_replicas_go_on_from_the_same_outer_parameters(source):
  mesh = MeshConfig(num_replicas=4, layout="mesh")
  made, state = resumed(config_on(mesh), source)
  seen = evaluation.losses(made.programs, state, made.data.validation)
  before = losses_before(source)["outer_loss"]
  np.testing.assert_allclose(seen["outer_loss"], before, atol=SAME_LOSS, rtol=0)


def test_twice_as_many_replicas_start_from_the_outer_parameters(
  source, tmp_path
):
  mesh = MeshConfig(num_replicas=4, layout="mesh", num_stages=2)
  config = config_on(mesh, checkpoint={"init_from": str(source)})
  made = runs.trainer(config, tmp_path)
  state = start.state_from_run(config, made.programs, "rounds", source)
  seen = evaluation.losses(made.programs, state, made.data.validation)
  before = losses_before(source)["outer_loss"]
  for view in ("outer_loss", "mean_loss", "replica_loss"):
    np.testing.assert_allclose(seen[view], before, atol=SAME_LOSS, rtol=0)
