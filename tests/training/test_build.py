import jax
import numpy as np

from dilocox_jax.training import build
from tests import runs


def test_the_learning_rate_follows_the_configs_schedule():
  inner = {"learning_rate": 0.5, "schedule": "constant", "warmup_steps": 5}
  schedule = build.programs(runs.settings(inner=inner)).schedule
  np.testing.assert_allclose(
    [np.asarray(schedule(step)) for step in (0, 2, 5, 20)],
    [0.0, 0.2, 0.5, 0.5],
    rtol=1e-6,
  )


def test_one_replica_alone_has_programs_of_its_own():
  config = runs.settings(
    num_replicas=3, layout="mesh", warm_start="single", warm_start_steps=3
  )
  programs = build.programs(config)
  assert programs.steps_of("single").replicas.num_replicas == 1
  assert programs.steps_of("data_parallel").replicas.num_replicas == 3
  assert programs.rounds.replicas.num_replicas == 3
  assert programs.rounds.replicas.layout == "mesh"


def test_evaluation_is_the_mean_over_batches_without_the_z_loss():
  config = runs.settings(model={"z_loss": 10.0})
  programs = runs.programs(config)
  params = jax.jit(programs.model.init)(jax.random.key(0))
  shape = (3, 2, runs.SEQUENCE_LENGTH + 1)
  batches = jax.random.randint(jax.random.key(1), shape, 0, 256)
  each = [float(programs.model.loss(params, batch)) for batch in batches]
  assert len(set(each)) == 3
  np.testing.assert_allclose(
    programs.evaluate(params, batches), np.mean(each), rtol=1e-6
  )


def test_training_counts_the_z_loss():
  params, losses = None, []
  batch = np.arange(2 * 17, dtype=np.int32).reshape(1, 1, 2, 17)
  for z_loss in (0.0, 10.0):
    config = runs.settings(model={"z_loss": z_loss}, num_replicas=1)
    programs = runs.programs(config)
    params = jax.jit(programs.model.init)(jax.random.key(0))
    _, seen = programs.steps.steps(programs.steps.init(params), batch)
    losses.append(float(seen.loss[0, 0]))
  assert losses[1] > losses[0] + 1.0
