"""Models that a user brings are trained on several devices a replica.

A replica on four devices must train as a replica on one device does.
"""

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec

import dilocox_jax as dx
from dilocox_jax.distributed.partition_rules import divided_by_rule
from dilocox_jax.models.custom import as_loss_model
from dilocox_jax.plan.model.division import Division
from dilocox_jax.plan.schedule import methods
from dilocox_jax.trees import leaves_by_path
from tests.tiers import slow

WIDTH = 16
NUM_CLASSES = 8
NUM_STEPS = 20
BATCH_SIZE = 8


class NnxModel(nnx.Module):
  """Two layers of NNX with partitioning metadata."""

  def __init__(self, rngs):
    divided_init = nnx.with_partitioning(
      nnx.initializers.lecun_normal(), (None, "data")
    )
    self.up = nnx.Linear(WIDTH, 32, kernel_init=divided_init, rngs=rngs)
    self.drop = nnx.LayerNorm(32, rngs=rngs)
    self.down = nnx.Linear(32, NUM_CLASSES, rngs=rngs)

  def __call__(self, inputs):
    return self.down(self.drop(nnx.tanh(self.up(inputs))))


class LinenModel(linen.Module):
  """Two layers of linen with partitioning metadata."""

  @linen.compact
  def __call__(self, inputs):
    divided_init = linen.with_partitioning(
      linen.initializers.lecun_normal(), ("data", None)
    )
    hidden = linen.Dense(32, kernel_init=divided_init)(inputs)
    return linen.Dense(NUM_CLASSES)(linen.tanh(hidden))


class EquinoxModel(equinox.Module):
  """A module of Equinox with stacked layers."""

  embed: jax.Array
  layers: jax.Array
  head: jax.Array

  def __call__(self, inputs):
    def layer(hidden, kernel):
      return hidden + jnp.tanh(hidden @ kernel), None

    hidden, _ = jax.lax.scan(layer, inputs @ self.embed, self.layers)
    return hidden @ self.head


def equinox_model():
  rng = np.random.default_rng(0)

  def kernel(*shape):
    return jnp.asarray(rng.normal(size=shape) / 8, jnp.float32)

  return EquinoxModel(
    kernel(WIDTH, 32), kernel(3, 32, 32), kernel(32, NUM_CLASSES)
  )


def functions():
  def init(key):
    first, second = jax.random.split(key)
    return {
      "up": jax.random.normal(first, (WIDTH, 32)) / 4,
      "down": jax.random.normal(second, (32, NUM_CLASSES)) / 6,
    }

  def apply(params, inputs):
    return jnp.tanh(inputs @ params["up"]) @ params["down"]

  return init, apply


MODELS = {
  "nnx": lambda: NnxModel,
  "linen": LinenModel,
  "equinox": equinox_model,
  "functions": functions,
}


def loss(model, batch):
  logits = model(batch["inputs"])
  return optax.softmax_cross_entropy_with_integer_labels(
    logits, batch["labels"]
  ).mean()


def examples():
  rng = np.random.default_rng(1)
  labels = rng.integers(0, NUM_CLASSES, 400)
  inputs = rng.normal(size=(400, WIDTH)).astype(np.float32)
  inputs[np.arange(400), labels] += 2.0
  data = {"inputs": inputs, "labels": labels}
  train = {name: values[:320] for name, values in data.items()}
  validation = {name: values[320:] for name, values in data.items()}
  return train, validation


def trained(tmp_path, name, mesh, method="diloco", config=(), **options):
  run = dx.train(
    MODELS[name](),
    examples(),
    method=method,
    replicas=2,
    steps=NUM_STEPS,
    loss=loss,
    workdir=tmp_path / f"{name}-{method}-{'-'.join(map(str, mesh.values()))}",
    config={
      "mesh": {"layout": "mesh", **mesh},
      "data": {"batch_size": BATCH_SIZE},
      "inner": {"learning_rate": 1e-2, "warmup_steps": 2},
      "sync": {"sync_interval": 5},
      "evaluation": {"interval_steps": 10},
      **dict(config),
    },
    quiet=True,
    **options,
  )
  return run


def assert_same_training(run, other):
  losses = [row.outer_loss for row in run.metrics.evaluations]
  other_losses = [row.outer_loss for row in other.metrics.evaluations]
  assert len(losses) > 1
  np.testing.assert_allclose(losses, other_losses, rtol=1e-5)
  for leaf, other_leaf in zip(
    jax.tree.leaves(run.params), jax.tree.leaves(other.params), strict=True
  ):
    np.testing.assert_allclose(leaf, other_leaf, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["diloco", "streaming_diloco"])
@pytest.mark.parametrize("name", list(MODELS))
def test_four_devices_train_as_one_does(tmp_path, name, method):
  one = trained(tmp_path, name, {"num_data_shards": 1}, method)
  four = trained(tmp_path, name, {"num_data_shards": 4}, method)
  assert_same_training(four, one)


@pytest.mark.parametrize(
  "options",
  [
    {"inner": {"optimizer": "muon", "clip_norm": 0.1}},
    {"inner": {"accumulate_steps": 2}},
    {"outer": {"average_power": 8}},
    {"exchange": {"codec": "int(bits=1)", "feedback": 1.0}},
    {"exchange": {"codec": "low_rank(rank=2)+int(bits=4)", "feedback": 1.0}},
  ],
  ids=["muon", "micro-batches", "average", "one bit", "low rank"],
)
def test_options_mean_the_same_on_several_devices(tmp_path, options):
  one = trained(tmp_path, "equinox", {"num_data_shards": 1}, config=options)
  four = trained(tmp_path, "equinox", {"num_data_shards": 4}, config=options)
  assert_same_training(four, one)


def test_a_function_divides_parameters_among_both_kinds_of_shards(tmp_path):
  """The up kernel by tensor shard and data shard, the down kernel reversed."""
  asked = []

  def partition(path, shape):
    asked.append((path, shape))
    if path == "up":
      return PartitionSpec("data", "tensor")
    return PartitionSpec(("tensor",), None)

  one = trained(tmp_path, "functions", {"num_data_shards": 1})
  four = trained(
    tmp_path,
    "functions",
    {"num_data_shards": 2, "num_tensor_shards": 2},
    partition=partition,
  )
  assert_same_training(four, one)
  assert set(asked) == {("up", (WIDTH, 32)), ("down", (32, NUM_CLASSES))}


def test_a_device_holds_a_part_of_every_large_array():
  """By the user's rule, by flax's metadata and by the largest dimension."""
  division = dx.divide_model(
    {
      "layers": {"up": np.zeros((6, 64, 256)), "odd": np.zeros((6, 64, 250))},
      "bias": np.zeros(256),
      "embedding": np.zeros((1000, 64)),
      "long": np.zeros(100_000),
      "chosen": np.zeros((8, 12)),
    },
    num_data_shards=4,
    partition=lambda path, shape: (
      PartitionSpec(None, "data") if path == "chosen" else None
    ),
  )
  specs = dict(division.leaf_specs or ())
  assert specs == {
    "layers/up": ((), (), ("data",)),
    "layers/odd": ((), ("data",), ()),
    "bias": ((),),
    "embedding": (("data",), ()),
    "long": (("data",),),
    "chosen": ((), ("data",)),
  }
  # A moment of an optimizer is divided like its parameter. An array that
  # belongs to no parameter is divided along its largest dimension.
  assert division.spec("0/mu/chosen", (8, 12)) == ((), ("data",))
  assert division.spec("0/factor", (12, 4)) == (("data",), ())
  # The spec of the parameter does not divide this array.
  assert division.spec("0/factor/chosen", (8, 3)) == (("data",), ())


@pytest.mark.parametrize("name", ["nnx", "linen"])
def test_metadata_of_flax_is_read(name):
  model = dx_model(name)
  shapes = {
    path: leaf.shape
    for path, leaf in leaves_by_path(
      jax.eval_shape(model.init, jax.random.key(0))
    ).items()
  }
  division = divided_by_rule(
    Division(num_data_shards=4), shapes, model.partition
  )
  specs = dict(division.leaf_specs or ())
  if name == "nnx":
    assert specs["up/kernel"] == ((), ("data",))
  else:
    assert specs["Dense_0/kernel"] == (("data",), ())


def dx_model(name):
  def example():
    return {"inputs": np.zeros((1, WIDTH)), "labels": np.zeros(1, np.int32)}

  return as_loss_model(MODELS[name](), loss, example)


@pytest.mark.parametrize(
  ("partition", "message"),
  [
    (
      lambda path, shape: PartitionSpec("model"),
      r"partition of up \[16, 32\]: there is no mesh axis 'model', only data "
      "and tensor: give partition, which maps",
    ),
    (
      lambda path, shape: PartitionSpec(None, None, "data"),
      r"up \[16, 32\]: P.* has 3 entries, but the parameter has 2",
    ),
    (
      lambda path, shape: PartitionSpec("data", "data"),
      r"up \[16, 32\]: .* names the axis .data. twice",
    ),
    (
      lambda path, shape: "data",
      r"up \[16, 32\]: it must be a jax.sharding.PartitionSpec or None, not s",
    ),
    (
      lambda path, shape: PartitionSpec(None, ("data", "tensor")),
      r"up \[16, 30\]: 4 shards \(data, tensor\) cannot divide a dimension of "
      "30: take another partition",
    ),
  ],
)
def test_a_wrong_rule_is_refused_with_path_and_shape(partition, message):
  width = 30 if "30" in message else 32
  with pytest.raises(ValueError, match=message) as error:
    dx.divide_model(
      {"up": np.zeros((16, width))},
      num_data_shards=2,
      num_tensor_shards=2,
      partition=partition,
    )
  assert "\n" not in str(error.value)


def test_divisions_that_need_more_knowledge_of_a_model_are_refused(tmp_path):
  with pytest.raises(ValueError, match="num_stages=2 needs a model in layers"):
    trained(tmp_path, "functions", {"num_stages": 2})
  with pytest.raises(ValueError, match="num_tensor_shards=2 needs to know"):
    trained(tmp_path, "functions", {"num_tensor_shards": 2})
  with pytest.raises(ValueError, match="partition: it needs a model"):
    dx.train(partition=lambda path, shape: None, workdir=tmp_path / "none")


@pytest.mark.parametrize("codec", ["float32", "int(bits=1)"])
def test_rounds_of_an_own_loop_run_on_several_devices(codec):
  init, apply = functions()
  optimizer = optax.sgd(0.1, momentum=0.9)
  train, _ = examples()

  def inner_step(params, state, batch):
    def batch_loss(params):
      return loss(lambda inputs: apply(params, inputs), batch)

    value, gradients = jax.value_and_grad(batch_loss)(params)
    updates, state = optimizer.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, (value, optax.tree.norm(gradients))

  def result(num_data_shards):
    params = init(jax.random.key(0))
    rounds = dx.make_rounds(
      methods.diloco(5),
      inner_step,
      optax.sgd(0.7, momentum=0.9, nesterov=True),
      num_replicas=2,
      layout="mesh",
      division=dx.divide_model(params, num_data_shards=num_data_shards),
      exchange=dx.exchange(codec, feedback=1.0),
    )
    state = rounds.init(params, optimizer.init(params))
    for first in (0, 80, 160, 240):
      batches = jax.tree.map(
        lambda leaf, first=first: leaf[first : first + 80].reshape(
          2, 5, BATCH_SIZE, *leaf.shape[1:]
        ),
        train,
      )
      state = rounds.run(state, batches)[0]
    return rounds.states.outer_params(state)

  one = result(1)
  four = result(4)
  up = four["up"]
  assert up.addressable_shards[0].data.shape == (WIDTH, 8)
  for name, leaf in one.items():
    np.testing.assert_allclose(four[name], leaf, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
  "of_table",
  [
    PartitionSpec("data", None),
    *slow(PartitionSpec(None, "data"), PartitionSpec("data", "tensor")),
  ],
)
def test_tokens_of_an_own_loop_look_up_a_table_of_both_kinds_of_shards(
  of_table,
):
  """XLA aborts this process if the step gets its part of the table."""
  rng = np.random.default_rng(2)
  specs = {
    "table": of_table,
    "up": PartitionSpec(None, "data", "tensor"),
    "down": PartitionSpec(None, "tensor", "data"),
  }
  shapes = {"table": (16, 8), "up": (2, 8, 12), "down": (2, 12, 8)}
  params = {
    path: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)
    for path, shape in shapes.items()
  }
  tokens = rng.integers(0, 16, (2, 4, BATCH_SIZE, 5)).astype(np.int32)
  optimizer = optax.sgd(0.1, momentum=0.9)

  def batch_loss(params, tokens):
    def layer(x, kernels):
      up, down = kernels
      return x + jnp.tanh(x @ up) @ down, None

    x, _ = jax.lax.scan(
      layer, params["table"][tokens], (params["up"], params["down"])
    )
    return jnp.mean(jnp.square(x[:, :-1] - jnp.cos(x[:, 1:])))

  def inner_step(params, state, batch):
    value, gradients = jax.value_and_grad(batch_loss)(params, batch)
    updates, state = optimizer.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, (value, optax.tree.norm(gradients))

  def result(num_shards):
    rounds = dx.make_rounds(
      methods.diloco(2),
      inner_step,
      optax.sgd(0.7, momentum=0.9, nesterov=True),
      num_replicas=2,
      layout="mesh",
      division=dx.divide_model(
        params,
        num_data_shards=num_shards,
        num_tensor_shards=num_shards,
        partition=lambda path, shape: specs[path],
      ),
    )
    state = rounds.init(params, optimizer.init(params))
    for steps in (slice(0, 2), slice(2, 4)):
      state = rounds.run(state, tokens[:, steps])[0]
    return rounds.states.outer_params(state)

  one = result(1)
  four = result(2)
  table = four["table"]
  assert table.addressable_shards[0].data.size < table.size
  for name, leaf in one.items():
    np.testing.assert_allclose(four[name], leaf, rtol=0, atol=1e-5)
    assert np.abs(leaf - params[name]).max() > 1e-3  # It learns.
