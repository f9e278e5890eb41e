import dataclasses

import jax
import numpy as np
import pytest

from dilocox_jax.training import build
from tests import runs


@pytest.mark.parametrize(
  "seed, source", [(0, "synthetic"), (1, "synthetic"), (0, "text_files")]
)
def test_the_text_is_the_one_asked_for(seed, source, tmp_path):
  text = b"one file of text\n" * 400
  for number in range(40):
    (tmp_path / f"{number}.txt").write_bytes(text + str(number).encode())
  data = {"source": source, "validation_fraction": 0.3}
  if source == "text_files":
    data["glob"] = str(tmp_path / "*.txt")
  config = dataclasses.replace(runs.settings(data=data), seed=seed)
  corpus = build.corpus(config)
  assert corpus.name == source
  size = corpus.train.size + corpus.validation.size
  if source == "text_files":
    assert corpus.num_files == 40
  np.testing.assert_allclose(corpus.validation.size / size, 0.3, atol=0.15)
  again = build.corpus(dataclasses.replace(config, seed=seed + 1))
  assert (again.digest == corpus.digest) == (source == "text_files")


def test_streams_and_held_out_text_have_the_configs_shapes():
  config = runs.settings(num_replicas=3, evaluation={"num_sequences": 7})
  corpus = build.corpus(config)
  width = runs.SEQUENCE_LENGTH + 1
  batches = build.streams(config, corpus).take(4)
  assert batches.shape == (3, 4, runs.BATCH_SIZE, width)
  (held_out,) = build.held_out(config, corpus)
  assert held_out.shape == (3, runs.BATCH_SIZE, width)  # 7, in whole batches.
  again = build.streams(dataclasses.replace(config, seed=1), corpus)
  assert (again.take(4) != batches).any()


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
