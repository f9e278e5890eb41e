"""The real outer side on the oracles' least-squares problem."""

import jax
import jax.numpy as jnp
import optax

from dilocox_jax.exchange.mean import mean_over_replicas
from dilocox_jax.inner.step import accumulated_gradient, inner_step
from dilocox_jax.mesh import Replicas
from dilocox_jax.outer.partition import Partition
from dilocox_jax.outer.programs import RoundPrograms, StepPrograms
from dilocox_jax.outer.transforms import OuterTransform
from dilocox_jax.plan.fragments import Fragments


def loss(params, batch):
  inputs, targets = batch
  blocks = params["blocks"]
  x = jnp.concatenate(
    [params["embed"], blocks["w"].reshape(-1), blocks["b"], params["head"]]
  )
  return 0.5 * jnp.mean(jnp.square(inputs @ x - targets))


def round_programs(method, num_layers, num_replicas, inner, outer, layout):
  fragments = Fragments(
    method.schedule.num_fragments, num_layers, method.fragment_order
  )
  transform = OuterTransform(
    method, Partition(fragments), outer, mean_over_replicas()
  )
  step = inner_step(accumulated_gradient(loss), inner)
  return RoundPrograms(transform, step, Replicas(num_replicas, layout))


def run_rounds(
  problem, method, inner, outer, *, num_steps, layout="stacked", flush=True
):
  """Trains by rounds and returns (state, losses [M, steps], programs)."""
  params, inputs, targets = jax.tree.map(jnp.asarray, problem)
  num_layers = params["blocks"]["b"].shape[0]
  programs = round_programs(
    method, num_layers, inputs.shape[0], inner, outer, layout
  )
  state = programs.init(params, inner.init(params))
  interval = method.schedule.sync_interval
  losses = []
  for start in range(0, num_steps, interval):
    count = min(interval, num_steps - start)
    batches = (
      inputs[:, start : start + count],
      targets[:, start : start + count],
    )
    windows = method.schedule.round_windows(start // interval, count)
    state, metrics, _ = programs.round(state, batches, windows)
    losses.append(metrics.loss)
  if flush:
    state = programs.flush(state, num_steps)
  return state, jnp.concatenate(losses, axis=1), programs


def run_steps(problem, optimizer, *, num_steps, layout="stacked"):
  """Trains data parallel and returns (state, losses)."""
  params, inputs, targets = jax.tree.map(jnp.asarray, problem)
  programs = StepPrograms(
    accumulated_gradient(loss),
    optimizer,
    mean_over_replicas(),
    Replicas(inputs.shape[0], layout),
  )
  batches = inputs[:, :num_steps], targets[:, :num_steps]
  state, metrics = programs.steps(programs.init(params), batches)
  return state, metrics.loss


def nesterov(learning_rate=0.7, momentum=0.6):
  return optax.sgd(learning_rate, momentum=momentum, nesterov=True)
