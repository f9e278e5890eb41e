"""The guide's script, and any model, against the reference page."""

import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import dilocox_jax as dx
from dilocox_jax.plan.schedule.fragments import balanced
from dilocox_jax.reference import exchanges, methods, optimizers
from dilocox_jax.trees import leaves_by_path
from tests.oracles import codecs

GUIDE = pathlib.Path(__file__).parents[2] / "docs/guides/own_training_loop.py"
NUM_REPLICAS, NUM_STEPS = 4, 60
CLOSE = 1e-5
RNG = np.random.default_rng(1)
INPUTS = RNG.normal(size=[NUM_STEPS, NUM_REPLICAS, 16, 4]).astype(np.float32)
TARGETS = np.sin(INPUTS.sum(-1, keepdims=True))
SCHEDULE = {"sync_interval": 10, "num_fragments": 2, "overlap_steps": 3}
INNER_RATE = 0.05


def plain():
  """A dict of arrays and a function."""
  rng = np.random.default_rng(2)

  def predict(params, x):
    return jnp.tanh(x @ params["first"]) @ params["second"]

  first, second = rng.normal(size=[4, 8]), rng.normal(size=[8, 1])
  params = {"first": first, "second": second}
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params), predict


def four_bits(name, values):
  """What is received of a leaf in 4 bits."""
  received = codecs.in_groups(
    values.reshape(1, -1), 128, lambda group: codecs.nearest(group, 4)[1]
  )
  return received.reshape(values.shape)


def by_reference(params, gradient, inputs, targets, inner):
  """Losses [M, steps] of the reference page, which knows no JAX."""
  leaves = leaves_by_path(params)
  structure = jax.tree.structure(params)

  def loss_and_gradient(tree, batch):
    tree = [jnp.asarray(tree[name], jnp.float32) for name in leaves]
    loss, grads = gradient(jax.tree.unflatten(structure, tree), *batch)
    return float(loss), jax.tree.map(np.float64, leaves_by_path(grads))

  shapes = {name: leaf.shape for name, leaf in leaves.items()}
  owner = balanced(shapes, SCHEDULE["num_fragments"])
  batches = [
    list(zip(inputs[:, m], targets[:, m], strict=True))
    for m in range(NUM_REPLICAS)
  ]
  return methods.train(
    loss_and_gradient,
    jax.tree.map(np.float64, leaves),
    batches,
    inner=inner,
    outer=optimizers.Sgd(0.7, 0.6, nesterov=True),
    sync_interval=SCHEDULE["sync_interval"],
    overlap_steps=SCHEDULE["overlap_steps"],
    rule="mix",
    mixing_alpha=0.5,
    fragments=[
      [path for path, number in owner.items() if number == p]
      for p in range(SCHEDULE["num_fragments"])
    ],
    exchange=exchanges.ErrorFeedback(exchanges.Lossy(four_bits)),
  ).losses


def test_a_tree_trains_as_on_the_reference_page():
  params, predict = plain()
  tx = dx.streaming_diloco(
    optax.sgd(INNER_RATE),
    optax.sgd(0.7, momentum=0.6, nesterov=True),
    # A reduce-scatter rounds the mean once more.
    exchange=dx.exchange("int(bits=4)", feedback=1.0, collective="all_gather"),
    **SCHEDULE,
  )

  def loss(params, x, y):
    return jnp.mean(jnp.square(predict(params, x) - y))

  def step(params, state, x, y):
    value, gradients = jax.value_and_grad(loss)(params, x, y)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value

  with jax.numpy_dtype_promotion("standard"):
    expected = by_reference(
      params,
      jax.jit(jax.value_and_grad(loss)),
      INPUTS,
      TARGETS,
      optimizers.Sgd(INNER_RATE),
    )
  stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * NUM_REPLICAS), params)
  state = jax.vmap(tx.init)(stacked)
  program = jax.jit(jax.vmap(step, axis_name="replica"), donate_argnums=(0, 1))
  for number in range(NUM_STEPS):
    stacked, state, losses = program(
      stacked, state, INPUTS[number], TARGETS[number]
    )
    np.testing.assert_allclose(losses, expected[:, number], rtol=0, atol=CLOSE)
  assert program._cache_size() == 1  # pyright: ignore


def test_the_guides_script_trains_as_on_the_reference_page(capsys, tmp_path):
  # The devices of this process are there already, so the script asks for none.
  script = tmp_path / "script.py"
  lines = GUIDE.read_text().splitlines(keepends=True)
  asked = [line for line in lines if "jax_num_cpu_devices" not in line]
  assert len(asked) == len(lines) - 1
  script.write_text("".join(asked))
  with jax.numpy_dtype_promotion("standard"):
    names = runpy.run_path(str(script))
    graph = names["graph"]

    def loss(params, x, y):
      return jnp.mean((nnx.merge(graph, params)(x) - y) ** 2)

    expected = by_reference(
      names["start"],
      jax.jit(jax.value_and_grad(loss)),
      np.asarray(names["inputs"]),
      np.asarray(names["targets"]),
      optimizers.Sgd(0.05, 0.9),
    )[:, -1]
  for line, name in zip(
    capsys.readouterr().out.splitlines(), ["vmap", "shard_map"], strict=True
  ):
    printed = [float(number) for number in re.findall(r"[\d.]+", line)]
    assert line.startswith(name)
    np.testing.assert_allclose(printed, expected, rtol=0, atol=CLOSE)
