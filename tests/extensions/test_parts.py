"""A model and a data source from outside the package."""

import dataclasses
from typing import ClassVar

import jax
import numpy as np
import pytest

from dilocox_jax.config import to_plan
from dilocox_jax.data.sources import SOURCES, register_source
from dilocox_jax.plan.model.presets import MODEL_PRESETS, register_model
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.training import build, run_text
from dilocox_jax.trees import leaves_by_path
from tests.extensions import runs, sums
from tests.extensions.running_mean import RunningMeanShape
from tests.outer import nano

pytestmark = pytest.mark.usefixtures("sums_registered", "model_registered")


def config(mesh=None, **data):
  return runs.config(
    mesh={"num_replicas": 3, **(mesh or {})},
    model={"preset": "running_mean", "model_dim": 32},
    data={"source": "sums", "batch_size": 4, "sequence_length": 16, **data},
    sync={"method": "diloco", "sync_interval": 4},
    inner={"warmup_steps": 2, "learning_rate": 1e-2},
  )


def test_the_plan_knows_the_models_parameters():
  model = build.programs(config()).model
  params = jax.eval_shape(model.init, jax.random.key(0))
  found = {p: leaf.shape for p, leaf in leaves_by_path(params).items()}
  assert found == to_plan.traffic(config()).shapes
  assert found["blocks/mean/mixing"] == (2, 32, 32)


def test_a_run_trains_the_model_on_the_text_and_is_simulated():
  text = run_text.corpus(config())
  assert text.name == "sums" and text.num_files == 100
  runs.assert_it_trains(config(), run_text.streams(config(), text).take(12))
  assert runs.simulated(config()).num_steps == 12


def test_its_layers_are_divided_among_stages():
  stages = {"num_replicas": 2, "layout": "mesh", "num_stages": 2}
  losses = []
  for mesh in ({"num_replicas": 2}, stages):
    of_mesh = config(mesh)
    text = run_text.streams(of_mesh, run_text.corpus(of_mesh)).take(12)
    losses.append(nano.train(of_mesh, text)[2].loss)
  np.testing.assert_allclose(*losses, rtol=1e-5)
  assert losses[1][:, -1].mean() < losses[1][:, 0].mean() - 0.05


def test_a_setting_that_the_source_does_not_read_is_refused():
  with pytest.raises(ValueError, match="data.glob='x' would be ignored"):
    config(glob="x")


def test_a_source_that_needs_what_configs_do_not_have_is_refused():
  before = dict(SOURCES)
  with pytest.raises(ValueError, match="unknown argument of data source 'n'"):
    register_source("n", lambda path: sums.sums(validation_fraction=0.1))
  with pytest.raises(ValueError, match="'sums' is registered already"):
    register_source("sums", sums.sums)
  assert dict(SOURCES) == before


@dataclasses.dataclass(frozen=True)
class Unbuilt(ModelShape):
  block_shapes = RunningMeanShape.block_shapes


@dataclasses.dataclass(frozen=True)
class Uncounted(ModelShape):
  builder: ClassVar = RunningMeanShape.builder


@pytest.mark.parametrize("kind", [Unbuilt, Uncounted])
def test_a_model_that_says_half_of_what_it_is_is_refused(kind):
  before = dict(MODEL_PRESETS)
  with pytest.raises(ValueError, match="give it both of"):
    register_model("half", kind(2, 16, 2, 24, 256))
  assert dict(MODEL_PRESETS) == before
