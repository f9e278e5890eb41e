"""Losses that draw random numbers: dropout in models of the user."""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import dilocox_jax as dx
from dilocox_jax.models.custom import as_loss_model
from dilocox_jax.models.random_loss import KeyedBatch
from dilocox_jax.training.keyed_streams import row_keys

WIDTH = 16
NUM_CLASSES = 8
NUM_STEPS = 12


class NnxModel(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(WIDTH, 32, rngs=rngs)
    self.dropout = nnx.Dropout(0.5)
    self.down = nnx.Linear(32, NUM_CLASSES, rngs=rngs)

  def __call__(self, inputs, key):
    hidden = nnx.tanh(self.up(inputs))
    if key is not None:
      hidden = self.dropout(hidden, deterministic=False, rngs=key)
    return self.down(hidden)


class LinenModel(linen.Module):
  @linen.compact
  def __call__(self, inputs, key):
    hidden = linen.tanh(linen.Dense(32)(inputs))
    hidden = linen.Dropout(0.5)(hidden, deterministic=key is None, rng=key)
    return linen.Dense(NUM_CLASSES)(hidden)


class EquinoxModel(equinox.Module):
  up: equinox.nn.Linear
  dropout: equinox.nn.Dropout
  down: equinox.nn.Linear

  def __init__(self, key):
    first, second = jax.random.split(key)
    self.up = equinox.nn.Linear(WIDTH, 32, key=first)
    self.dropout = equinox.nn.Dropout(0.5)
    self.down = equinox.nn.Linear(32, NUM_CLASSES, key=second)

  def __call__(self, inputs, key):
    hidden = jnp.tanh(jax.vmap(self.up)(inputs))
    hidden = self.dropout(hidden, key=key, inference=key is None)
    return jax.vmap(self.down)(hidden)


def loss(model, batch, key):
  logits = model(batch["inputs"], key)
  return optax.softmax_cross_entropy_with_integer_labels(
    logits, batch["labels"]
  ).mean()


def functions():
  def init(key):
    first, second = jax.random.split(key)
    return {
      "up": jax.random.normal(first, (WIDTH, 32)) / 4,
      "down": jax.random.normal(second, (32, NUM_CLASSES)) / 6,
    }

  def loss_of_params(params, batch, key):
    def model(inputs, key):
      hidden = jnp.tanh(inputs @ params["up"])
      if key is not None:
        kept = jax.random.bernoulli(key, 0.5, hidden.shape)
        hidden = jnp.where(kept, 2 * hidden, 0)
      return hidden @ params["down"]

    return loss(model, batch, key)

  return init, loss_of_params


MODELS = {
  "nnx": lambda: (NnxModel, loss),
  "linen": lambda: (LinenModel(), loss),
  "equinox": lambda: (EquinoxModel(jax.random.key(0)), loss),
  "functions": lambda: (functions(), None),
}


def examples():
  rng = np.random.default_rng(1)
  labels = rng.integers(0, NUM_CLASSES, 240)
  inputs = rng.normal(size=(240, WIDTH)).astype(np.float32)
  data = {"inputs": inputs, "labels": labels}
  train = {name: values[:200] for name, values in data.items()}
  validation = {name: values[200:] for name, values in data.items()}
  return train, validation


def trained(workdir, name="functions", on_round=None, **sections):
  model, loss = MODELS[name]()
  config = {
    "data": {"batch_size": 8},
    "inner": {"learning_rate": 1e-2, "warmup_steps": 2},
    "sync": {"sync_interval": 3},
    "evaluation": {"interval_steps": 6},
    "checkpoint": {"interval_steps": 6},
  }
  return dx.train(
    model,
    examples(),
    method="diloco",
    replicas=2,
    steps=NUM_STEPS,
    loss=loss,
    workdir=workdir,
    config={**config, **sections},
    on_round=on_round,
    quiet=True,
  )


def same(run, other, atol=0.0):
  leaves = zip(
    jax.tree.leaves(run.params), jax.tree.leaves(other.params), strict=True
  )
  return all(np.allclose(a, b, rtol=0, atol=atol) for a, b in leaves)


@pytest.mark.parametrize("name", list(MODELS))
def test_a_loss_gets_a_key_in_training_and_none_in_evaluations(name):
  model, loss = MODELS[name]()
  train, _ = examples()
  batch = {key: values[:8] for key, values in train.items()}
  loss_model = as_loss_model(model, loss, lambda: batch)
  assert loss_model.draws_random
  params = loss_model.init(jax.random.key(0))
  plain = [float(loss_model.loss(params, batch)) for _ in range(2)]
  assert plain[0] == plain[1]
  first, again, other = (
    float(loss_model.loss(params, KeyedBatch(batch, row_keys(0, 0, step, 8))))
    for step in (0, 0, 1)
  )
  assert first == again
  assert len({first, other, plain[0]}) == 3


@pytest.mark.parametrize("name", ["nnx", "functions"])
def test_four_devices_drop_what_one_device_drops(tmp_path, name):
  one = trained(tmp_path / "one", name, mesh={"layout": "mesh"})
  four = trained(
    tmp_path / "four", name, mesh={"layout": "mesh", "num_data_shards": 4}
  )
  assert same(four, one, atol=1e-5)
  losses = [
    [row.outer_loss for row in r.metrics.evaluations] for r in (one, four)
  ]
  np.testing.assert_allclose(*losses, rtol=1e-5)


def test_a_run_that_goes_on_draws_what_it_would_have_drawn(tmp_path):
  def fail(finished):
    if finished.step == 9:
      raise InterruptedError

  whole = trained(tmp_path / "whole")
  with pytest.raises(InterruptedError):
    trained(tmp_path / "parts", on_round=fail)
  assert same(trained(tmp_path / "parts"), whole)


def test_each_replica_step_and_micro_batch_has_another_key(tmp_path):
  keys = [
    row_keys(0, replica, step, 4) for replica in (0, 1) for step in (0, 1)
  ]
  assert len(np.unique(np.concatenate(keys), axis=0)) == 16
  whole = trained(tmp_path / "whole")
  halves = trained(tmp_path / "halves", inner={"accumulate_steps": 2})
  assert not same(whole, halves, atol=1e-4)


def test_a_default_value_is_no_key():
  def smoothed(params, batch, smoothing=0.1):
    return smoothing * jnp.sum(params["w"]) * jnp.mean(batch)

  model = as_loss_model((lambda key: {"w": jnp.ones(3)}, smoothed))
  assert not model.draws_random
