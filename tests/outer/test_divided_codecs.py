"""A divided replica sends what the plain numpy reference sends, and learns it.

The reference knows no devices: its codecs have the scales, the ranks and the
residuals of whole leaves. So must the codecs of a replica whose leaves are
divided among devices.
"""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import dilocox_jax as dx
from dilocox_jax.aggregators.collective import FLAG_BYTES
from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.codecs.low_rank import Factors
from dilocox_jax.codecs.named import named_codec
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.config.sections import ExchangeConfig
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.optimizers import inner_optimizer
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.reference import optimizers
from dilocox_jax.reference.exchanges import ErrorFeedback, Lossy, SharedFactors
from dilocox_jax.reference.methods import train
from dilocox_jax.trees import leaves_by_path, nested
from tests import compiled_text as hlo
from tests.oracles import config as oracle
from tests.oracles.divisions import OfParts
from tests.oracles.slices import train_slices
from tests.tiers import slow

TOLERANCE = 1e-5
NUM_REPLICAS = 2
NUM_DEVICES = 4  # Of a replica: two data shards times two tensor shards.
NUM_LAYERS = 2
ROUNDS = 5
RATE = 0.02
RANK = 2
SHAPES = {
  "embed": (16, 20),
  "blocks/kernel": (NUM_LAYERS, 20, 36),
  "bias": (20,),
}
SPECS = {
  "embed": (None, "data"),
  "blocks/kernel": (None, "data", "tensor"),
  "bias": ("tensor",),
}
PARTS = {
  path: tuple(2 if axis else 1 for axis in spec) for path, spec in SPECS.items()
}
_RNG = np.random.default_rng(0)
PARAMS = {path: _RNG.normal(size=shape) / 4 for path, shape in SHAPES.items()}
# The right factors with which low rank begins.
FACTORS = {
  path: _RNG.normal(size=(*SHAPES[path][:-2], SHAPES[path][-1], RANK))
  for path in ("embed", "blocks/kernel")
}

# Both methods have the codec and the optimizers of their recipes.
METHODS = {
  "overlap_loco": methods.overlap_loco(4, 4),
  "dilocox": methods.dilocox(4),
}
CODECS = {
  "overlap_loco": "int(bits=1)",
  "dilocox": f"low_rank(rank={RANK})+int(bits=4)",
}
QUANTIZERS = {"overlap_loco": Int(bits=1), "dilocox": Int(bits=4)}
# What XLA may send with.
COLLECTIVES = (
  *("all-gather", "all-reduce", "all-to-all", "reduce-scatter"),
  "collective-permute",
)
NUM_MESSAGES = {"overlap_loco": 1, "dilocox": 2}  # Of an exchange.
OUTER = {"overlap_loco": (1.0, 0.0), "dilocox": (0.7, 0.6)}
OPTIONS = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.01}


def inner_of(name):
  """The inner optimizer of a method: that of the package, and its twin."""
  rate = optax.constant_schedule(RATE)
  if name == "dilocox":
    twin = optimizers.AdamW(RATE, **OPTIONS)
    return inner_optimizer("adamw", rate, clip_norm=0.0, **OPTIONS), twin
  rest = optimizers.AdamW(RATE, nesterov=True, **OPTIONS)
  twin = optimizers.Muon(RATE, ("blocks/kernel",), rest, weight_decay=0.01)
  return inner_optimizer("muon", rate, clip_norm=0.0, **OPTIONS), twin


def loss(params, batch):
  inputs, targets = batch
  x = inputs @ params["embed"]
  for layer in range(NUM_LAYERS):
    kernel = params["blocks"]["kernel"][layer]
    x = x + jnp.tanh(x @ kernel) @ kernel.T
  return jnp.mean(jnp.square(x + params["bias"][None] - targets))


def batches_of(method):
  """Inputs and targets [replicas, steps, rows, features] of all rounds."""
  num_steps = ROUNDS * method.schedule.sync_interval
  rng = np.random.default_rng(1)
  inputs = rng.normal(size=(NUM_REPLICAS, num_steps, 8, 16))
  weights = rng.normal(size=(NUM_REPLICAS, 1, 16, 20))
  return inputs, np.tanh(inputs @ weights)


@functools.cache
def division():
  return dx.divide_model(
    nested(PARAMS),
    num_data_shards=2,
    num_tensor_shards=2,
    partition=lambda path, shape: PartitionSpec(*SPECS[path]),
  )


def with_first_factors(state):
  """The state of rounds whose low-rank codecs begin with `FACTORS`."""

  def begin(path, old):
    if not isinstance(old, Factors):
      return old
    right = np.float32(FACTORS[path]).reshape(old.right.shape)
    return Factors(jax.device_put(right, old.right.sharding))

  fragments = []
  for fragment in state.fragments:
    states = fragment.exchange.codec
    codec = {path: begin(path, old) for path, old in states.items()}
    exchange = fragment.exchange._replace(codec=codec)
    fragments.append(fragment._replace(exchange=exchange))
  return state._replace(fragments=tuple(fragments))


def trained(name):
  """Outer parameters, and parameters of all replicas, after the flush."""
  method = METHODS[name]
  optimizer, _ = inner_of(name)
  rate, momentum = OUTER[name]

  def inner_step(params, state, batch):
    value, gradients = jax.value_and_grad(loss)(params, batch)
    updates, state = optimizer.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
    norm = optax.tree.norm(gradients)
    return params, state, (jnp.float32(value), jnp.float32(norm))

  rounds = dx.make_rounds(
    method,
    inner_step,
    optax.sgd(rate, momentum=momentum or None, nesterov=momentum > 0),
    num_replicas=NUM_REPLICAS,
    layout="mesh",
    division=division(),
    exchange=dx.exchange(CODECS[name], feedback=1.0),
  )
  params = jax.tree.map(jnp.asarray, nested(PARAMS))
  state = with_first_factors(rounds.init(params, optimizer.init(params)))
  batches = batches_of(method)
  interval = method.schedule.sync_interval
  for start in range(0, ROUNDS * interval, interval):
    steps = slice(start, start + interval)
    state, *_ = rounds.run(state, tuple(leaf[:, steps] for leaf in batches))
  kernel = state.replica.params["blocks"]["kernel"]
  assert kernel.addressable_shards[0].data.shape == (1, NUM_LAYERS, 10, 18)
  state, _ = rounds.flush(state)
  trees = rounds.outer_params(state), state.replica.params
  return map(leaves_by_path, jax.device_get(trees))


def counted(codec, quantizer, sizes):
  """A codec of the reference that appends the bytes of each leaf to `sizes`."""

  def encode(name, leaf):
    num_layers = len(leaf) if name.startswith("blocks/") else 1
    layer = leaf.shape[1:] if name.startswith("blocks/") else leaf.shape
    width = oracle.row_width(quantizer, layer)
    num_rows = num_layers * -(-math.prod(layer) // width)
    sizes.append(num_rows * (-(-width * quantizer.bits // 8) + 2))
    return codec(name, leaf)

  return encode


@functools.cache
def twin(name, is_of_parts=False):
  """The reference's run, and the bytes that a replica sends in it."""
  method = METHODS[name]
  schedule = method.schedule
  quantizer = QUANTIZERS[name]
  section = ExchangeConfig(f"int(bits={quantizer.bits})", "all_gather")
  sizes = []
  lossy: Any = oracle.lossy_mean(section, NUM_REPLICAS)
  exchange: Any = Lossy(counted(lossy.codec, quantizer, sizes))
  if name == "dilocox":
    exchange = SharedFactors(RANK, exchange, {} if is_of_parts else FACTORS)
  exchange = ErrorFeedback(exchange)
  if is_of_parts:
    exchange = OfParts(exchange, PARTS)
  gradient = jax.jit(jax.value_and_grad(loss))

  def loss_and_gradient(leaves, batch):
    value, gradients = gradient(nested(leaves), batch)
    return float(value), leaves_by_path(jax.device_get(gradients))

  # For each replica a list with the inputs and targets of every step.
  batches = []
  for inputs, targets in zip(*batches_of(method), strict=True):
    batches.append(list(zip(inputs, targets, strict=True)))
  rate, momentum = OUTER[name]
  settings = {
    "inner": inner_of(name)[1],
    "outer": optimizers.Sgd(rate, momentum, nesterov=momentum > 0),
    "sync_interval": schedule.sync_interval,
    "overlap_steps": schedule.overlap_steps,
    "rule": method.rule,
    "exchange": exchange,
  }
  if schedule.num_fragments == 1:
    found = train(loss_and_gradient, PARAMS, batches, **settings)
  else:
    found = train_slices(
      loss_and_gradient,
      PARAMS,
      batches,
      num_fragments=schedule.num_fragments,
      fragment_order=method.fragment_order,
      **settings,
    )
  return found, sum(sizes) // NUM_REPLICAS


def distance(found, expected):
  """The largest error of a leaf, relative to its largest value."""
  return max(
    np.abs(found[path] - leaf).max() / np.abs(leaf).max()
    for path, leaf in expected.items()
  )


@pytest.mark.parametrize("name", ["overlap_loco", *slow("dilocox")])
def test_two_replicas_of_four_devices_are_those_of_the_reference(name, x64):
  theta, params = trained(name)
  expected, _ = twin(name)
  assert distance(theta, expected.theta) < TOLERANCE
  for m, own in enumerate(expected.params):
    found = {path: leaf[m] for path, leaf in params.items()}
    assert distance(found, own) < TOLERANCE
  assert distance(PARAMS, expected.theta) > 0.1  # They learn.


@pytest.mark.parametrize("name", METHODS)
def test_a_codec_of_each_device_would_be_noticed(name, x64):
  whole, whole_bytes = twin(name)
  parts, parts_bytes = twin(name, is_of_parts=True)
  assert distance(parts.theta, whole.theta) > 1000 * TOLERANCE
  assert parts_bytes > whole_bytes


def num_exchanges(schedule):
  """How many exchanges a run and its flush apply."""
  end = ROUNDS * schedule.sync_interval
  windows = schedule.windows(0, end) + schedule.flush_windows(end)
  return sum(window.applied is not None for window in windows)


@pytest.mark.parametrize("name", METHODS)
def test_the_plan_counts_the_bytes_of_the_reference(name, x64):
  method = METHODS[name]
  fragments = Fragments(
    method.schedule.num_fragments, NUM_LAYERS, method.fragment_order
  )
  codec = named_codec(CODECS[name])
  traffic = Traffic(method, fragments, SHAPES, NUM_REPLICAS, codec)
  # All fragments have equally many bytes.
  planned = num_exchanges(method.schedule) * traffic.exchange_bytes(0)
  flags = num_exchanges(method.schedule) * NUM_MESSAGES[name] * FLAG_BYTES
  assert planned == twin(name)[1] + flags


def numbers_in(text):
  return [int(number) for number in re.findall(r"\d+", text)]


def groups_of(collective):
  """Numbers of the devices in each group of a collective, [groups][devices].

  XLA lists them, "{{0,4},{1,5}}", or says how to reshape and transpose them:
  "[4,2]<=[2,4]T(1,0)" are the groups 0 4, 1 5, 2 6 and 3 7. Or it names the
  axes of a mesh: "mesh['replica'=2,'data'=4] {'replica'}" are the same groups.
  """
  listed = collective.attribute(
    r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}"
  )
  if listed:
    return [numbers_in(group) for group in listed.split("},{")]
  numbers = np.arange(NUM_REPLICAS * NUM_DEVICES)
  of_mesh = r"replica_groups=(mesh\[[^\]]*\] \{[^}]*\})"
  if text := collective.attribute(of_mesh):
    axes, chosen = text.split("] {")
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes))
    names = re.findall(r"'(\w+)'", chosen)
    numbers = numbers.reshape([int(size) for size in sizes.values()])
    last = [list(sizes).index(name) for name in names]
    numbers = np.moveaxis(numbers, last, range(-len(last), 0))
    length = math.prod(int(sizes[name]) for name in names)
    return numbers.reshape(-1, length).tolist()
  text = collective.attribute(r"replica_groups=(\[[^ ]*?)(?:, |$)") or ""
  found = re.fullmatch(r"(.*)<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
  assert found, collective
  shape, sizes, order = found.groups()
  numbers = numbers.reshape(numbers_in(sizes))
  numbers = numbers.transpose(numbers_in(order) if order else None)
  return numbers.reshape(numbers_in(shape)).tolist()


def is_among_replicas(instruction):
  """Whether an instruction sends between devices of different replicas."""
  opcode = instruction.opcode.removesuffix("-start")
  return opcode in COLLECTIVES and any(
    len({number // NUM_DEVICES for number in group}) > 1
    for group in groups_of(instruction)
  )


@pytest.mark.parametrize("name", ["overlap_loco", *slow("dilocox")])
def test_all_devices_together_send_the_bytes_of_the_reference(name):
  method = METHODS[name]
  replicas = Replicas(NUM_REPLICAS, "mesh", division())
  aggregator = dx.exchange(CODECS[name], feedback=1.0)
  fragments = Fragments(
    method.schedule.num_fragments, NUM_LAYERS, method.fragment_order
  )
  values = nested(
    {
      path: jax.ShapeDtypeStruct((NUM_REPLICAS, *shape), jnp.float32)
      for path, shape in fragments.shapes(0, SHAPES).items()
    }
  )

  def one(values):
    state = aggregator.init(values)
    mean, state = aggregator.update(values, state)
    return replicas.divided(mean)

  program = jax.jit(replicas.map(one, (0,), None))
  lowered = program.lower(replicas.abstract(values, 0))
  module = hlo.parse(lowered.compile().as_text() or "")
  sent = NUM_DEVICES * sum(
    module.operand_bytes(instruction)
    for instructions in module.computations.values()
    for instruction in instructions
    if is_among_replicas(instruction)
  )
  with jax.enable_x64(True):
    expected = twin(name)[1] // num_exchanges(method.schedule)
  flags = NUM_MESSAGES[name] * FLAG_BYTES
  padding = sent - expected - flags
  assert 0 <= padding < NUM_MESSAGES[name] * NUM_DEVICES
