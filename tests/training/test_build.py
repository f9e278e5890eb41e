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
