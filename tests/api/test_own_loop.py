"""The guide's script against the reference page, which knows no JAX."""

import pathlib
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dilocox_jax.plan.schedule.fragments import balanced
from dilocox_jax.reference import exchanges, methods, optimizers
from dilocox_jax.trees import leaves_by_path
from tests.oracles import codecs

GUIDE = pathlib.Path(__file__).parents[2] / "docs/guides/own_training_loop.py"
CLOSE = 1e-5
SCHEDULE = {"sync_interval": 10, "num_fragments": 2, "overlap_steps": 3}


def four_bits(name, values):
  """What is received of a leaf in 4 bits."""
  received = codecs.in_groups(
    values.reshape(1, -1), 128, lambda group: codecs.nearest(group, 4)[1]
  )
  return received.reshape(values.shape)


def by_reference(params, gradient, inputs, targets, inner):
  """Losses [M, steps] of the reference page."""
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
    for m in range(inputs.shape[1])
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
