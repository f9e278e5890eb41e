"""The real outer side on the oracles' least-squares problem."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dilocox_jax.aggregators.exchange import mean_of_finite_replicas
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.inner.step import accumulated_gradient, inner_step
from dilocox_jax.outer.fragment_view import FragmentView
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.outer.step_state import outer_params
from dilocox_jax.outer.step_transform import pseudo_gradient_steps
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.growing_schedule import GrowingSchedule
from dilocox_jax.reference import optimizers
from dilocox_jax.rounds.data_parallel import StepPrograms
from dilocox_jax.rounds.rounds import Rounds
from tests.oracles import least_squares

EXACT = 1e-12  # float64; sums of a few hundred terms near 1
ROUNDED = 1e-5  # How far fp32 codecs may lead in some tens of exchanges.
FUSION_TOLERANCE = 1e-5  # Relative and absolute; see `assert_rounded_alike`.
INNER_RATE = 0.05
SGD = optax.sgd(INNER_RATE)


def loss(params, batch):
  inputs, targets = batch
  blocks = params["blocks"]
  x = jnp.concatenate(
    [params["embed"], blocks["w"].reshape(-1), blocks["b"], params["head"]]
  )
  # What is tested is what methods make of gradients, so these are exact.
  with jax.default_matmul_precision("highest"):
    return 0.5 * jnp.mean(jnp.square(inputs @ x - targets))


def nesterov(learning_rate=0.7, momentum=0.6):
  return optax.sgd(learning_rate, momentum=momentum, nesterov=True)


def settings_of(method):
  """The settings of the reference, with `nesterov` outside."""
  settings = {
    "sync_interval": method.schedule.sync_interval,
    "overlap_steps": method.schedule.overlap_steps,
    "rule": method.rule,
    "mixing_alpha": method.mixing_alpha,
    "outer": optimizers.Sgd(0.7, 0.6, nesterov=True),
  }
  if isinstance(method.schedule, GrowingSchedule):
    settings["first_interval"] = method.schedule.first_interval
    settings["steps_per_doubling"] = method.schedule.steps_per_doubling
  return settings


def oracle(problem, method, num_steps, **changes):
  """The reference's run of a method."""
  settings = settings_of(method) | {
    "num_fragments": method.schedule.num_fragments,
    "fragment_order": method.fragment_order,
    "inner": optimizers.Sgd(INNER_RATE),
    "num_steps": num_steps,
  }
  return least_squares.train(*problem, **settings | changes)


def stacked(trees):
  """One tree with leaves [M, ...] where each replica has its own."""
  if isinstance(trees, list):
    return jax.tree.map(lambda *x: np.stack(x), *trees)
  return trees


def fragments_of(method, num_layers):
  count = method.schedule.num_fragments
  return FragmentView(
    count, Fragments(count, num_layers, method.fragment_order)
  )


def rounds(
  method,
  num_layers,
  num_replicas,
  inner,
  outer,
  layout="stacked",
  aggregator=None,
):
  """The method's `Rounds` for the problem's parameters."""
  return Rounds(
    outer=OuterStep(method, outer, aggregator or mean_of_finite_replicas()),
    view=fragments_of(method, num_layers),
    replicas=Replicas(num_replicas, layout),
    inner_step=inner_step(accumulated_gradient(loss), inner),
  )


def begin(problem, method, inner, outer, layout="stacked", aggregator=None):
  """The programs for a problem, and their first state."""
  params = jax.tree.map(jnp.asarray, problem[0])
  sizes = params["blocks"]["b"].shape[0], len(problem[1])
  programs = rounds(method, *sizes, inner, outer, layout, aggregator)
  return programs, programs.init(params, inner.init(params))


def batches_of(problem, start, stop):
  """The batches of inner steps start < s <= stop, leaves [M, steps, ...]."""
  return jax.tree.map(
    lambda leaf: jnp.asarray(leaf[:, start:stop]), problem[1:]
  )


def walk(programs, state, problem, num_steps, start=0, portion=None):
  """Runs rounds, or portions; yields (steps done, state, metrics) after each.

  A state that was yielded is used up by the next round.
  """
  portion = portion or programs.outer.method.schedule.sync_interval
  while start < num_steps:
    stop = min(start + portion, num_steps)
    state, metrics, _ = programs.run(state, batches_of(problem, start, stop))
    start = stop
    yield start, state, metrics


def outer_tree(programs, state):
  """The newest outer parameters, [M, ...] where every replica has its own."""
  whole = programs.states.adopted(state.replica.params, state.fragments)
  if not programs.outer.is_shared:
    return whole
  return jax.tree.map(lambda leaf: leaf[0], whole)


def run_rounds(problem, method, inner, outer, *, num_steps):
  """Trains by rounds and returns (flushed state, losses, programs)."""
  programs, state = begin(problem, method, inner, outer)
  losses = []
  for passed in walk(programs, state, problem, num_steps):
    _, state, metrics = passed
    losses.append(metrics.loss)
  state, _ = programs.flush(state)
  return state, jnp.concatenate(losses, axis=1), programs


def step_programs(optimizer, num_replicas, layout="stacked"):
  return StepPrograms(
    accumulated_gradient(loss),
    optimizer,
    mean_of_finite_replicas(),
    Replicas(num_replicas, layout),
  )


def run_steps(problem, optimizer, *, num_steps, layout="stacked"):
  """Trains data parallel and returns (state, metrics)."""
  problem = jax.tree.map(jnp.asarray, problem)
  programs = step_programs(optimizer, problem[1].shape[0], layout)
  state = programs.init(problem[0])
  return programs.steps(state, batches_of(problem, 0, num_steps))


def assert_close(actual, expected, tolerance):
  """Compares trees leaf by leaf, relative and absolute."""

  def close(a, b):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

  jax.tree.map(close, actual, expected)


def assert_equal(actual, expected):
  """Compares trees bit by bit."""
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_rounded_alike(actual, expected):
  """Compares trees that two programs compute from the same data.

  They are equal bit by bit, unless the compiler may round a * b + c once where
  the two meet in one program and twice where they do not. `make check` lets it,
  as it does for users.
  """
  if os.environ.get("DILOCOX_JAX_COMPILE") == "full":
    assert_close(actual, expected, FUSION_TOLERANCE)
  else:
    assert_equal(actual, expected)


def transform(method, inner, num_layers=4, aggregator=None):
  """The method's transform, with fragments as the trainer has them."""
  aggregator = aggregator or mean_of_finite_replicas()
  outer = OuterStep(method, nesterov(), aggregator)
  return pseudo_gradient_steps(outer, inner, fragments_of(method, num_layers))


def one_step(tx):
  """The code of one replica: (params, state, batch) -> the same two."""

  def step(params, state, batch):
    gradients = jax.grad(loss)(params, batch)
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  return step


def outer_params_by_transform(
  problem, method, inner, num_steps, aggregator=None
):
  """Trains by a transform; returns the outer parameters [M, ...]."""
  tx = transform(method, inner, aggregator=aggregator)
  params, inputs, targets = problem
  params = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(inputs)), params)
  state = jax.vmap(tx.init, axis_name="replica")(params)
  step = jax.jit(jax.vmap(one_step(tx), axis_name="replica"))
  for number in range(num_steps):
    batch = inputs[:, number], targets[:, number]
    params, state = step(params, state, batch)
  return outer_params(state, params)
