"""What the plan says is on the wire is what the compiled program moves.

The compiler for TPUs chooses other operations than that for CPUs: it turns a
gathering over slices into a sum, for example, so that codes would go twice.
"""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

from dilocox_jax.aggregators.exchange import exchange
from dilocox_jax.aggregators.norm_filter import norm_filter
from dilocox_jax.aggregators.traffic import Traffic, exchange_operations
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.quantize import E3M0, Float, Int
from dilocox_jax.codecs.sparse import RandomMask, TopK
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.outer.drift import measure_drift
from dilocox_jax.outer.fragment_view import FragmentView
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.plan.model.division import Division
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.rounds.data_parallel import StepPrograms
from dilocox_jax.rounds.rounds import Rounds
from experiments.tools.absent_devices import (
  absent_devices,
  is_tpu_compiler_installed,
)
from experiments.tools.compiled_transfers import transfers
from tests import compiled_text as hlo
from tests.compiled_text import is_inner_loop
from tests.tiers import slow

NUM_LAYERS = 4
# Odd sizes: bytes that are not filled and chunks that are not whole.
SHAPES = {
  "embed": (37, 11),
  "blocks/w": (NUM_LAYERS, 13, 9),
  "blocks/b": (NUM_LAYERS, 7),
}
LOW_RANK = LowRank(2, then=Int(4))
SPARSE = TopK(0.1, 64, then=Int(2))
COCKTAIL = RandomMask(0.5, then=TopK(0.25, 4096, "bitmap", Int(4)))
KINDS = {
  "all-reduce": "all_reduce",
  "all-gather": "all_gather",
  "all-to-all": "all_to_all",
}


def inside_kind(instruction):
  """Kind of a collective among the devices of one program, or None."""
  kind = instruction.opcode.removesuffix("-start")
  return kind if kind in (*KINDS, "collective-permute") else None


def operations(text):
  """Kind and operand bytes of one device's collectives, sorted."""
  module = hlo.parse(text)
  found = []
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


def traffic(method, codec, collective, num_replicas, *more):
  fragments = Fragments(method.schedule.num_fragments, NUM_LAYERS)
  given = fragments, SHAPES, num_replicas, codec, collective
  return Traffic(method, *given, *more)


def rounds(method, codec, collective, num_replicas, ratio=None):
  aggregator = exchange(codec, feedback=1.0, collective=collective)
  if ratio:
    aggregator = norm_filter(aggregator, ratio)
  return Rounds(
    outer=OuterStep(method, optax.sgd(1.0), aggregator),
    view=FragmentView(
      method.schedule.num_fragments,
      Fragments(method.schedule.num_fragments, NUM_LAYERS),
    ),
    replicas=Replicas(num_replicas, "mesh"),
    inner_step=descend,
  )


@pytest.mark.parametrize(
  ("codec", "collective", "num_replicas", "num_fragments"),
  [
    (Float(), "auto", 2, 3),
    (Float(), "all_gather", 3, 1),
    (Int(4), "auto", 3, 3),
    (Int(1), "reduce_scatter", 3, 1),
    (LOW_RANK, "all_gather", 3, 1),
    (COCKTAIL, "auto", 2, 1),
    *slow(
      (Float("bfloat16"), "reduce_scatter", 2, 3),
      (Int(4, "row"), "reduce_scatter", 3, 1),
      (E3M0(), "all_gather", 3, 3),
      (SPARSE, "auto", 3, 1),
    ),
  ],
)
def test_an_exchange_moves_the_bytes_of_the_plan(
  codec, collective, num_replicas, num_fragments
):
  method = methods.delayed(7, num_fragments)
  programs = rounds(method, codec, collective, num_replicas)
  plan = traffic(method, codec, collective, num_replicas)
  state = programs.states.abstract(params_like(SHAPES), ())

  def exchanged(fragment, own):
    result, kept = programs.outer.exchange(fragment, own)
    return result.mean, kept, measure_drift(result)

  for number in {0, num_fragments - 1}:
    fragment = state.fragments[number]
    own = jax.tree.map(
      lambda leaf: jnp.zeros((num_replicas, *leaf.shape)), fragment.params
    )
    mapped = programs.replicas.map(exchanged, (programs.outer.axes, 0), 0)
    text = jax.jit(mapped).lower(fragment, own).compile().as_text()
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
  ("method", "codec", "num_replicas", "ratio"),
  [
    (methods.diloco(4), LOW_RANK, 3, None),
    *slow((methods.streaming_diloco(6, 3, 1), E3M0(), 2, None)),
    (methods.dilocox(4), LOW_RANK, 2, 5.0),
    (methods.delayed(6, 3, 9), Int(4), 3, None),
  ],
)
def test_a_window_moves_the_bytes_of_the_exchange_that_arrives_in_it(
  method, codec, num_replicas, ratio
):
  plan = traffic(method, codec, "auto", num_replicas, ratio is not None)
  programs = rounds(method, codec, "auto", num_replicas, ratio)
  schedule = method.schedule
  start = 3 * schedule.sync_interval
  batches = programs.replicas.abstract(
    jnp.zeros((num_replicas, schedule.sync_interval)), 0
  )
  seen = set()
  for window in schedule.windows(start, start + schedule.sync_interval):
    in_flight = schedule.num_in_flight(start)
    start += window.num_steps
    if programs.kind(window) in seen:
      continue
    seen.add(programs.kind(window))
    state = programs.states.abstract(params_like(SHAPES), (), in_flight)
    text = programs.lowered(state, batches, window).compile().as_text()
    expected = plan.exchange(window.applied.fragment) if window.applied else []
    assert operations(text) == planned(*expected)
    # Each turn of an exchange has inner steps of its own.
    turns = [each.turn for each in expected if schedule.depth]
    assert num_inner_loops(text) == 1 + max(turns, default=0)
  assert any(kind.applied_group is not None for kind in seen)


def test_a_data_parallel_step_moves_the_bytes_of_its_gradients():
  method = methods.cocktail_sgd()
  aggregator = exchange(COCKTAIL, feedback=1.0)
  programs = StepPrograms(
    quadratic, optax.sgd(0.1), aggregator, Replicas(2, "mesh")
  )
  state = programs.abstract(params_like(SHAPES))
  batches = programs.replicas.abstract(jnp.zeros((2, 5)), 0)
  text = programs.compiled.lower(state, batches, None).compile().as_text()
  plan = traffic(method, COCKTAIL, "auto", 2)
  assert operations(text) == planned(*plan.gradient())


@pytest.mark.slow
@pytest.mark.skipif(
  not is_tpu_compiler_installed(), reason="make compile-report installs libtpu"
)
@pytest.mark.parametrize(
  "codec",
  [Float(), Int(4), E3M0(), LowRank(32, then=Int(4)), COCKTAIL],
  ids=repr,
)
def test_an_exchange_between_slices_sends_the_bytes_of_the_plan(codec):
  # Large enough for the tiles of 1024 values that a chip sends.
  shapes = {
    **{"embed/embedding": (512, 256), "blocks/up/bias": (4, 512)},
    "blocks/up/kernel": (4, 256, 512),
  }
  division = Division(2, 2)
  devices = tuple(absent_devices("v5e:2x2", num_slices=2).devices)
  replicas = Replicas(2, "mesh", division, devices)
  aggregator = exchange(codec, feedback=1.0)
  params = params_like(shapes)
  axes = aggregator.axes

  def one(values, state):
    mean, state = aggregator.update(values, state)
    return replicas.divided(mean), replicas.divided(state)

  def both(tree):
    return jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), tree
    )

  program = jax.jit(replicas.map(one, (0, axes), (None, axes)))
  values = replicas.abstract(both(params), 0)
  state = jax.eval_shape(aggregator.init, params)
  state = state._replace(residual=both(state.residual))
  lowered = program.lower(values, replicas.abstract(state, axes))
  found = transfers(lowered.compile().as_text() or "")
  sent = division.num_devices * sum(each.sent_bytes(2) for each in found)
  planned = sum(
    each.sent_bytes(2) for each in exchange_operations(codec, shapes, 2)
  )
  assert 1 <= sent / planned < 1.05
