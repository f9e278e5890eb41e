"""The gradient of a model whose layers are spread over a replica's stages.

All stages run this one program. In every tick each looks up in the timetable
what it has to do, does it, and hands what it made to its neighbours. Forward
and backward are ticks like any other, so the schedule alone decides how many
micro-batches' activations are alive at once. The program is a scan over ticks
around a loop over layers: it grows with neither, nor with the number of
micro-batches.

Letters in names: T tokens, D model, K layers of a chunk.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dilocox_jax.inner.boundary import AS_COMPUTED, Boundary
from dilocox_jax.inner.pipeline_layer import layer
from dilocox_jax.inner.pipeline_stage import (
  CutModel,
  Stage,
  State,
  Tick,
  put,
  when,
)
from dilocox_jax.plan.model.division import STAGE_AXIS
from dilocox_jax.plan.pipeline.timetable import ACTIONS, Timetable
from dilocox_jax.pytypes import Scalar, Tree
from dilocox_jax.trees import leaves_by_path

# (blocks, rest, tokens) -> (loss, gradients of blocks, gradients of rest).
PipelinedGradient = Callable[[Tree, Tree, Array], tuple[Scalar, Tree, Tree]]


def pipelined_gradient(
  model: CutModel,
  table: Timetable,
  layer_counts: Sequence[Sequence[int]],
  *,
  remat: str = "dots",
  boundary: Boundary = AS_COMPUTED,
  fill: float | int = 0.0,
) -> PipelinedGradient:
  """Builds one stage's gradient, for a region that is manual over the stages.

  Args:
    model: What it computes.
    table: Which stage does what in which tick.
    layer_counts: Layers that each chunk of each stage holds: [stage][chunk].
    remat: What a layer's forward keeps for its backward: "none", "dots" or
      "full"; see `pipeline_layer.layer`.
    boundary: How activations and gradients travel between stages.
    fill: What buffers hold before they are written. No value may change the
      result.

  Returns:
    (blocks, rest, tokens) -> (loss, block gradients, rest gradients).
    `blocks`: this stage's layers, leaves [chunks, K, ...] with K the largest
    of all layer counts; last rows of a shorter chunk are not read. `rest`: all
    other leaves, whole. `tokens`: int32 [m, b, L + 1]. Results are means over
    the m micro-batches, in fp32 at least, and this stage's contribution: loss
    and rest gradients are for the caller to sum over the stages.

  Raises:
    ValueError: If the layer counts do not fit the table.
  """
  counts = np.asarray(layer_counts, np.int32)
  if counts.shape != (table.num_stages, table.num_chunks):
    raise ValueError(
      f"layer_counts={layer_counts} must be {table.num_stages} stages of "
      f"{table.num_chunks} chunks"
    )
  # A stage by itself has no link to save.
  boundary = boundary if table.num_stages > 1 else AS_COMPUTED

  def gradient(blocks: Tree, rest: Tree, tokens: Int[Array, "m b S"]):
    x_TxD = jax.eval_shape(model.embed, rest, tokens[0, :, :-1])
    one = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0, 0], blocks))
    split = layer(model.block, one, x_TxD, tokens.shape[2] - 1, remat)
    # Cast once: a kernel that is cast by a forward would be kept by it.
    leaves = {
      path: x.astype(split.kernel_dtypes.get(path, x.dtype))
      for path, x in leaves_by_path(blocks).items()
    }
    number = jax.lax.axis_index(STAGE_AXIS)
    stage = Stage(model, split, boundary, counts, number, leaves, rest, tokens)
    totals = leaves_by_path(blocks), rest
    state = _first_state(stage, table, x_TxD, totals, fill)
    state, _ = jax.lax.scan(
      _tick(stage, table), state, _column(table, stage.number)
    )
    loss, found, rest_gradients = jax.tree.map(
      lambda total: total / tokens.shape[0],
      (state.loss, state.block_gradients, state.rest_gradients),
    )
    structure = jax.tree.structure(blocks)
    in_order = [found[path] for path in leaves]
    return loss, jax.tree.unflatten(structure, in_order), rest_gradients

  return gradient


def _tick(stage: Stage, table: Timetable) -> Callable:
  """One row of the timetable, on one stage: the body of the scan."""
  busy = [n for n in np.unique(table.action) if ACTIONS[n] != "idle"]
  decode = stage.boundary.decode
  down = [(s, (s + 1) % table.num_stages) for s in range(table.num_stages)]
  up = [(target, source) for source, target in down]

  def tick(state: State, at: Tick) -> tuple[State, None]:
    dtype = state.activations.dtype
    arrived = decode(state.activations_sent, dtype)
    turned = decode(state.gradients_sent, dtype)
    state = state._replace(
      activations=put(state.activations, arrived, at.activation_put),
      gradients=put(state.gradients, turned, at.gradient_put),
    )
    for number in busy:
      name = ACTIONS[number]
      action = getattr(stage, name)
      state = when(at.action == number, name, action, at, state)
    if table.num_stages > 1:
      state = state._replace(
        activations_sent=jax.lax.ppermute(
          state.activations_sent, STAGE_AXIS, down
        ),
        gradients_sent=jax.lax.ppermute(state.gradients_sent, STAGE_AXIS, up),
      )
    return state, None

  return tick


def _column(table: Timetable, number: Array) -> Tick:
  """What one stage reads of the timetable; leaves [ticks]."""
  return Tick(
    *(
      jax.lax.dynamic_index_in_dim(
        jnp.asarray(getattr(table, field)), number, axis=1, keepdims=False
      )
      for field in Tick._fields
    )
  )


def _first_state(
  stage: Stage,
  table: Timetable,
  x_TxD: jax.ShapeDtypeStruct,
  totals: tuple[Tree, Tree],
  fill: float | int,
) -> State:
  """Buffers that hold nothing yet, and sums of nothing."""

  def buffers(tree: Tree, *slots: int) -> Tree:
    def buffer(one: jax.ShapeDtypeStruct) -> Array:
      value = fill if jnp.issubdtype(one.dtype, jnp.inexact) else 0
      return jnp.full((*slots, *one.shape), value, one.dtype)

    return jax.tree.map(buffer, tree)

  def zeros(x: Array | jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(x.shape, np.promote_types(np.float32, x.dtype))

  most = int(stage.counts.max())
  message = jax.eval_shape(stage.boundary.encode, x_TxD)
  block_gradients, rest_gradients = jax.tree.map(zeros, totals)
  return State(
    activations=buffers(x_TxD, table.num_activation_slots + 1),
    gradients=buffers(x_TxD, table.num_gradient_slots + 1),
    activations_sent=buffers(message),
    gradients_sent=buffers(message),
    kept=buffers(stage.layer.kept, table.num_saved_slots, most),
    pairs=buffers(stage.layer.pairs, table.num_pair_slots, most),
    loss=zeros(jax.ShapeDtypeStruct((), x_TxD.dtype)),
    block_gradients=block_gradients,
    rest_gradients=rest_gradients,
  )
