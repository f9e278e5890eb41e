"""Every setting of the section `inner` reaches what is trained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dilocox_jax.config.sections import InnerConfig
from dilocox_jax.training import build
from tests import runs
from tests.aggregators.problem import NUM_REPLICAS, close, draw, named, replica
from tests.oracles import config as oracle

EXACT = 1e-6  # fp32, values near 1
NUM_STEPS = 8
# Norms of the mean of 263 values are about 0.4, 7, 1, ...: some are clipped.
SIZES = 0.02 * np.asarray([1, 20, 3, 0.5, 50, 2, 8, 5], np.float32)
BASE = {"learning_rate": 0.05, "warmup_steps": 2}
SGD = {"optimizer": "sgd", "learning_rate": 0.05}
CASES = [
  ("optimizer", {"optimizer": "sgd"}),
  ("learning_rate", {"learning_rate": 0.02}),
  ("schedule", {"schedule": "wsd"}),
  ("schedule", {"schedule": "constant"}),
  ("warmup_steps", {"warmup_steps": 4}),
  ("final_fraction", {"final_fraction": 0.7}),
  ("clip_norm", {"clip_norm": 3.0}),
  ("clip_norm", {"clip_norm": 0.0}),
  ("b1", {"b1": 0.7}),
  ("b2", {"b2": 0.8}),
  ("weight_decay", {"weight_decay": 0.6}),
  ("momentum", {"momentum": 0.8, **SGD}),
]
# The mean over micro-batches is the mean over the batch: not seen in results.
UNSEEN = {"accumulate_steps"}


def test_every_setting_of_the_section_has_a_case():
  fields = {field.name for field in dataclasses.fields(InnerConfig)}
  assert {field for field, _ in CASES} | UNSEEN == fields


def settings(inner, **kwargs):
  return runs.settings(
    total_steps=NUM_STEPS,
    num_replicas=NUM_REPLICAS,
    inner={**BASE, **inner},
    **kwargs,
  )


def gradients():
  """The replicas' gradients of every step, leaves [M, steps, ...]."""
  each = [
    jax.tree.map(lambda leaf, size=size: size * leaf, draw(step))
    for step, size in enumerate(SIZES)
  ]
  return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *each)


def given(params, batch):
  """A loss whose gradient is the batch itself."""
  del params
  return jnp.float32(0.0), batch


def expected(config, num_replicas=NUM_REPLICAS):
  """The parameters after all steps on the mean gradient, in numpy."""
  params = named(replica(draw(100)))
  optimizer = oracle.Inner(config.inner, config.total_steps)
  for step in range(NUM_STEPS):
    mean = {
      name: leaf[:num_replicas, step].mean(axis=0)
      for name, leaf in named(gradients()).items()
    }
    params = optimizer.step(params, mean)
  return params


def distance(one, other):
  return max(np.abs(one[name] - other[name]).max() for name in one)


@pytest.mark.parametrize(("field", "inner"), CASES)
def test_steps_are_those_of_the_numpy_twin_with_the_same_settings(field, inner):
  config = settings(inner)
  steps = build.programs(config).steps
  steps = dataclasses.replace(steps, gradient=given)
  state, _ = steps.steps(steps.init(replica(draw(100))), gradients())
  found, twin = named(state.params), expected(config)
  close(found, twin, EXACT)
  # The twin without this one setting ends elsewhere, far beyond rounding.
  usual = {**dataclasses.asdict(InnerConfig()), **BASE}
  other = expected(settings({**inner, field: usual[field]}))
  assert distance(twin, other) > 1e-3


def test_a_warm_start_of_one_replica_has_the_same_settings():
  inner = {"b1": 0.7, "b2": 0.8, "weight_decay": 0.6, "clip_norm": 3.0}
  config = settings(inner, warm_start="single", warm_start_steps=5)
  single = build.programs(config).single
  steps = dataclasses.replace(single, gradient=given)
  first = jax.tree.map(lambda leaf: leaf[:1], gradients())
  state, _ = steps.steps(steps.init(replica(draw(100))), first)
  close(named(state.params), expected(config, num_replicas=1), EXACT)


ALL_ADAMW = {"b1": 0.7, "b2": 0.8, "weight_decay": 0.6, "clip_norm": 0.3}
ALL_SGD = {**SGD, "momentum": 0.8, "clip_norm": 0.3}


@pytest.fixture(scope="module", name="gradient")
def gradient_fixture():
  """Nano's (params, batch) -> gradients, not made by the assembly."""
  model = build.programs(settings({})).model
  return jax.jit(jax.grad(model.loss))


@pytest.mark.parametrize("inner", [ALL_ADAMW, ALL_SGD])
def test_local_steps_of_a_round_are_those_of_the_numpy_twin(inner, gradient):
  num_steps = 3
  config = settings(inner, sync_interval=num_steps)
  programs = build.programs(config)
  shape = (NUM_REPLICAS, num_steps, 2, runs.SEQUENCE_LENGTH + 1)
  batches = np.random.default_rng(0).integers(0, 256, shape, dtype=np.int32)
  start = jax.jit(programs.model.init)(jax.random.key(0))
  # Of DiLoCoX the first round's local steps are all that replicas have done.
  state = programs.rounds.init(start, programs.steps.optimizer.init(start))
  state, _, _ = programs.rounds.run(state, batches)
  structure = jax.tree.structure(start)
  for m in range(NUM_REPLICAS):
    twin = oracle.Inner(config.inner, config.total_steps)
    params = before = named(start)
    for batch in batches[m]:
      leaves = [leaf.astype(np.float32) for leaf in params.values()]
      tree = jax.tree.unflatten(structure, leaves)
      params = twin.step(params, named(gradient(tree, batch)))
    found = named(replica(state.replica.params, m))
    # fp32 gradients of two programs; where they nearly vanish Adam's quotient
    # of them has few digits, so all leaves are taken together.
    error = sum(np.sum((found[n] - params[n]) ** 2) for n in params)
    moved = sum(np.sum((before[n] - params[n]) ** 2) for n in params)
    assert np.sqrt(error) < 1e-3 * np.sqrt(moved)


@pytest.mark.parametrize("accumulate_steps", [1, 5])
def test_a_batch_is_taken_in_as_many_parts_as_asked_for(accumulate_steps):
  config = settings(
    {"accumulate_steps": accumulate_steps}, data={"batch_size": 5}
  )
  programs = build.programs(config)
  start = jax.eval_shape(programs.model.init, jax.random.key(0))
  batch = jnp.zeros((5, runs.SEQUENCE_LENGTH + 1), jnp.int32)
  text = str(jax.make_jaxpr(programs.steps.gradient)(start, batch))
  # Nothing else in nano comes in fives.
  assert ("length=5" in text) == (accumulate_steps == 5)
