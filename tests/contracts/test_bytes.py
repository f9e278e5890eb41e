"""What the plan says is on the wire is what the compiled program moves."""

import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.exchange.compressed import Compression
from dilocox_jax.exchange.feedback import Feedback, compressed_mean
from dilocox_jax.outer.data_parallel import StepPrograms
from dilocox_jax.outer.drift import measure_drift
from dilocox_jax.outer.partition import Partition
from dilocox_jax.outer.programs import RoundPrograms
from dilocox_jax.outer.transforms import OuterTransform
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.wire.chain import Chain
from dilocox_jax.plan.wire.payload import E3M0, Dense, Int
from dilocox_jax.plan.wire.reduction import LowRank, RandomMask, TopK
from dilocox_jax.plan.wire.traffic import Traffic
from experiments.compilation import hlo
from experiments.compilation.transfers import inside_kind, is_inner_loop

NUM_LAYERS = 4
# Odd sizes: bytes that are not filled and chunks that are not whole.
SHAPES = {
  "embed": (37, 11),
  "blocks/w": (NUM_LAYERS, 13, 9),
  "blocks/b": (NUM_LAYERS, 7),
}
LOW_RANK = Chain((LowRank(2), Int(4)))
SPARSE = Chain((TopK(0.1, 64), Int(2)))
COCKTAIL = Chain((RandomMask(0.5), TopK(0.25, 4096, "bitmap"), Int(4)))
KINDS = {
  "all-reduce": "all_reduce",
  "all-gather": "all_gather",
  "all-to-all": "all_to_all",
}


def operations(text):
  """Kind and operand bytes of one device's collectives, sorted.

  Args:
    text: A compiled module; every collective counts as often as it stands
      there, whatever loop it stands in.
  """
  module, found = hlo.parse(text), []
  for instruction in itertools.chain(*module.computations.values()):
    kind = inside_kind(instruction)
    assert kind in (None, *KINDS), f"not expected among replicas: {instruction}"
    if kind:
      found.append((KINDS[kind], module.operand_bytes(instruction)))
  return sorted(found)


def num_inner_loops(text):
  """Number of loops over inner steps."""
  module = hlo.parse(text)
  return sum(map(is_inner_loop, itertools.chain(*module.computations.values())))


def permuted(text):
  """Operand bytes of one device's permutes, which only extensions use."""
  module = hlo.parse(text)
  return [
    module.operand_bytes(instruction)
    for instruction in itertools.chain(*module.computations.values())
    if inside_kind(instruction) == "collective-permute"
  ]


def planned(*collectives):
  """The same of the plan."""
  return sorted((each.kind, each.operand_bytes) for each in collectives)


def params_like(shapes):
  tree = {}
  for path, shape in shapes.items():
    *above, name = path.split("/")
    part = tree
    for key in above:
      part = part.setdefault(key, {})
    part[name] = jnp.zeros(shape)
  return tree


def traffic(method, payload, collective, num_replicas):
  fragments = Fragments(method.schedule.num_fragments, NUM_LAYERS)
  return Traffic(method, fragments, SHAPES, num_replicas, payload, collective)


def outer_transform(method, payload, collective):
  aggregator = compressed_mean(Compression(payload, collective), Feedback())
  fragments = Fragments(method.schedule.num_fragments, NUM_LAYERS)
  return OuterTransform(
    method, Partition(fragments), optax.sgd(1.0), aggregator
  )


def exchange(outer, fragment, own, state):
  """One exchange of a fragment, and the drift behind it."""
  state, arrival = outer.exchange(state, fragment, own)
  return state.exchange, arrival.mean, measure_drift(arrival)


@pytest.mark.parametrize(
  ("payload", "collective", "num_replicas", "num_fragments"),
  [
    (Dense(), "auto", 2, 3),
    (Dense(), "all_gather", 3, 1),
    (Dense(), "reduce_scatter", 3, 1),
    (Dense("float16"), "auto", 2, 1),
    (Dense("float16"), "all_reduce", 2, 1),
    (Dense("bfloat16"), "reduce_scatter", 2, 3),
    (Int(4), "auto", 2, 1),
    (Int(4), "auto", 3, 3),
    (Int(4, "row"), "reduce_scatter", 3, 1),
    (E3M0(), "all_gather", 3, 3),
    (LOW_RANK, "all_gather", 3, 1),
    (LOW_RANK, "reduce_scatter", 2, 1),
    (SPARSE, "auto", 3, 1),
    (COCKTAIL, "auto", 2, 1),
  ],
)
def test_an_exchange_moves_the_bytes_of_the_plan(
  payload, collective, num_replicas, num_fragments
):
  method = methods.delayed(7, num_fragments)
  outer = outer_transform(method, payload, collective)
  plan = traffic(method, payload, collective, num_replicas)
  params = params_like(SHAPES)

  replicas = Replicas(num_replicas, "mesh")
  state = outer.init(params)
  for number in {0, num_fragments - 1}:
    fragment = jnp.int32(number) if number else 0
    own = outer.partition.take(params, fragment)
    own = jax.tree.map(lambda leaf: jnp.stack([leaf] * num_replicas), own)
    one = functools.partial(exchange, outer, fragment)
    program = jax.jit(replicas.map(one, (0, None), 0))
    text = program.lower(own, state).compile().as_text()
    assert operations(text) == planned(*plan.exchange(number))


def quadratic(params, batch):
  """A loss without a transformer: it has no part in what is exchanged."""
  gradient = jax.tree.map(lambda leaf: leaf - batch, params)
  return optax.tree.norm(gradient), gradient


def descend(params, state, batch):
  loss, gradient = quadratic(params, batch)
  params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
  return params, state, (loss, loss)


@pytest.mark.parametrize(
  ("method", "payload", "num_replicas"),
  [
    (methods.diloco(4), LOW_RANK, 3),
    (methods.streaming_diloco(6, 3, 1), E3M0(), 2),
    (methods.dilocox(4), COCKTAIL, 2),
    (methods.dilocox(4), LOW_RANK, 2),
    (methods.delayed(6, 3, 9), Int(4), 3),
  ],
)
def test_a_round_moves_the_bytes_of_the_exchanges_that_arrive_in_it(
  method, payload, num_replicas
):
  outer = outer_transform(method, payload, "auto")
  plan = traffic(method, payload, "auto", num_replicas)
  programs = RoundPrograms(outer, descend, Replicas(num_replicas, "mesh"))
  windows = method.schedule.round_windows(3)
  shapes, tables = programs.groups(windows)
  state = programs.abstract(params_like(SHAPES), ())
  batches = programs.replicas.abstract(
    jnp.zeros((num_replicas, method.schedule.sync_interval)), 0
  )
  tables = programs.replicas.abstract(tables, None)
  lowered = programs.compiled(shapes).lower(state, batches, tables)
  text = lowered.compile().as_text()
  # Layer fragments are alike, and one loop exchanges them in turn.
  expected = [
    operation
    for piece in shapes
    if piece.applied
    for operation in plan.exchange(0 if piece.applied == "first" else 1)
  ]
  assert expected
  assert operations(text) == planned(*expected)
  # Each turn of an exchange has inner steps of its own.
  turns = 1 + max(each.turn for each in expected)
  loops = sum(
    each.has_steps_after + (turns if each.applied and outer.depth else 1)
    for each in shapes
  )
  assert num_inner_loops(text) == loops


def test_a_data_parallel_step_moves_the_bytes_of_its_gradients():
  method = methods.cocktail_sgd()
  aggregator = compressed_mean(Compression(COCKTAIL), Feedback())
  programs = StepPrograms(
    quadratic, optax.sgd(0.1), aggregator, Replicas(2, "mesh")
  )
  state = programs.abstract(params_like(SHAPES))
  batches = programs.replicas.abstract(jnp.zeros((2, 5)), 0)
  text = programs.compiled.lower(state, batches).compile().as_text()
  plan = traffic(method, COCKTAIL, "auto", 2)
  assert operations(text) == planned(*plan.gradient())
