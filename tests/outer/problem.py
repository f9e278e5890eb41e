"""The real outer side on the oracles' least-squares problem."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.exchange.mean import mean_of_finite_replicas
from dilocox_jax.inner.step import accumulated_gradient, inner_step
from dilocox_jax.outer.data_parallel import StepPrograms
from dilocox_jax.outer.partition import Partition
from dilocox_jax.outer.programs import RoundPrograms
from dilocox_jax.outer.transforms import OuterTransform
from dilocox_jax.plan.schedule.fragments import Fragments

FUSION_TOLERANCE = 1e-5  # Relative and absolute; see `assert_rounded_alike`.


def loss(params, batch):
  inputs, targets = batch
  blocks = params["blocks"]
  x = jnp.concatenate(
    [params["embed"], blocks["w"].reshape(-1), blocks["b"], params["head"]]
  )
  # What is tested is what methods make of gradients, so these are exact.
  with jax.default_matmul_precision("highest"):
    return 0.5 * jnp.mean(jnp.square(inputs @ x - targets))


def outer_transform(method, num_layers, outer, aggregator=None):
  fragments = Fragments(
    method.schedule.num_fragments, num_layers, method.fragment_order
  )
  aggregator = aggregator or mean_of_finite_replicas()
  return OuterTransform(method, Partition(fragments), outer, aggregator)


def round_programs(method, num_layers, num_replicas, inner, outer, layout):
  transform = outer_transform(method, num_layers, outer)
  step = inner_step(accumulated_gradient(loss), inner)
  return RoundPrograms(transform, step, Replicas(num_replicas, layout))


def batches_of(problem, start, stop):
  """The batches of inner steps start < s <= stop, leaves [M, steps, ...]."""
  return problem[1][:, start:stop], problem[2][:, start:stop]


def walk(programs, state, problem, num_steps, start=0):
  """Runs rounds; yields (steps done, state, metrics) after each.

  A state that was yielded is used up by the next round.
  """
  schedule = programs.outer.method.schedule
  while start < num_steps:
    stop = min(start + schedule.sync_interval, num_steps)
    windows = schedule.round_windows(
      start // schedule.sync_interval, stop - start
    )
    batches = jax.tree.map(jnp.asarray, batches_of(problem, start, stop))
    state, metrics, _ = programs.round(state, batches, windows)
    start = stop
    yield start, state, metrics


def begin(problem, method, inner, outer, layout="stacked"):
  """The programs for a problem, and their first state."""
  params = jax.tree.map(jnp.asarray, problem[0])
  num_layers = params["blocks"]["b"].shape[0]
  num_replicas = problem[1].shape[0]
  programs = round_programs(
    method, num_layers, num_replicas, inner, outer, layout
  )
  return programs, programs.init(params, inner.init(params))


def run_rounds(
  problem, method, inner, outer, *, num_steps, layout="stacked", flush=True
):
  """Trains by rounds and returns (state, losses [M, steps], programs)."""
  programs, state = begin(problem, method, inner, outer, layout)
  losses = []
  for passed in walk(programs, state, problem, num_steps):
    _, state, metrics = passed
    losses.append(metrics.loss)
  if flush:
    state, _ = programs.flush(state, num_steps)
  return state, jnp.concatenate(losses, axis=1), programs


def step_programs(optimizer, num_replicas, layout="stacked"):
  return StepPrograms(
    accumulated_gradient(loss),
    optimizer,
    mean_of_finite_replicas(),
    Replicas(num_replicas, layout),
  )


def run_steps(problem, optimizer, *, num_steps, layout="stacked"):
  """Trains data parallel and returns (state, losses)."""
  problem = jax.tree.map(jnp.asarray, problem)
  programs = step_programs(optimizer, problem[1].shape[0], layout)
  state = programs.init(problem[0])
  state, metrics = programs.steps(state, batches_of(problem, 0, num_steps))
  return state, metrics.loss


def nesterov(learning_rate=0.7, momentum=0.6):
  return optax.sgd(learning_rate, momentum=momentum, nesterov=True)


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
