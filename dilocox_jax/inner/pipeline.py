"""Computes the gradient of a model whose layers are spread over stages.

All stages of a replica run this one program. In every tick each stage looks up
its action in the timetable, runs it, and sends the result to its neighbours.
Forward and backward are ticks like any other, so the schedule alone decides
how many micro-batches' activations are alive at once. The program is a scan
over ticks around a loop over layers. It does not grow with the number of
ticks, layers or micro-batches.

Letters in names: T tokens, D model, K layers of a chunk.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dilocox_jax.inner.activation_codec import AS_COMPUTED, ActivationCodec
from dilocox_jax.inner.pipeline_layer import split_layer
from dilocox_jax.inner.pipeline_stage import (
  CutModel,
  Stage,
  StageState,
  TickNumbers,
  put,
  when,
)
from dilocox_jax.plan.model.division import STAGE_AXIS
from dilocox_jax.plan.pipeline.timetable import ACTIONS, Timetable
from dilocox_jax.trees import Scalar, Tree, leaves_by_path

# (blocks, rest, tokens) -> (loss, gradients of blocks, gradients of rest).
PipelinedGradient = Callable[[Tree, Tree, Array], tuple[Scalar, Tree, Tree]]


def pipelined_gradient(
  model: CutModel,
  table: Timetable,
  layer_counts: Sequence[Sequence[int]],
  *,
  remat: str = "dots",
  codec: ActivationCodec = AS_COMPUTED,
) -> PipelinedGradient:
  """Builds one stage's gradient, for a region that is manual over the stages.

  Args:
    model: The model.
    table: The action of every stage in every tick.
    layer_counts: Layers that each chunk of each stage holds: [stage][chunk].
    remat: What a layer's forward saves for its backward: "none", "dots" or
      "full"; see `models.remat`.
    codec: Encoding of activations and gradients between stages.

  Returns:
    (blocks, rest, tokens) -> (loss, block gradients, rest gradients).
    `blocks`: this stage's layers, leaves [chunks, K, ...], where K is the
    largest of all layer counts. The last rows of a shorter chunk are not read.
    `rest`: all other leaves, whole. `tokens`: int32 [m, b, L + 1]. Results are
    means over the m micro-batches, in fp32 or wider. They are this stage's
    contribution: the caller must sum the loss and the rest gradients over the
    stages.
  """
  counts = np.asarray(layer_counts, np.int32)
  # A single stage sends nothing, so rounding would only lose accuracy.
  codec = codec if table.num_stages > 1 else AS_COMPUTED

  def gradient(blocks: Tree, rest: Tree, tokens: Int[Array, "m b S"]):
    x_TxD = jax.eval_shape(model.embed, rest, tokens[0, :, :-1])
    layer = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0, 0], blocks))
    context = jax.eval_shape(model.context, tokens[0, :, :-1])
    split = split_layer(
      model.block, layer, x_TxD, tokens.shape[2] - 1, remat, context
    )
    # Kernels are cast once, before the scan. If a forward cast its kernel, the
    # cast copy would be a residual and so be saved for every micro-batch.
    leaves = {
      path: x.astype(split.kernel_dtypes.get(path, x.dtype))
      for path, x in leaves_by_path(blocks).items()
    }
    number = jax.lax.axis_index(STAGE_AXIS)
    stage = Stage(model, counts, number, leaves, rest, tokens, split, codec)
    totals = leaves_by_path(blocks), rest
    state = _first_state(stage, table, x_TxD, totals)
    state, _ = jax.lax.scan(
      _tick(stage, table), state, stage_column(table, stage.number)
    )
    loss, block_gradients, rest_gradients = jax.tree.map(
      lambda total: total / tokens.shape[0],
      (state.loss, state.block_gradients, state.rest_gradients),
    )
    structure = jax.tree.structure(blocks)
    in_order = [block_gradients[path] for path in leaves]
    return loss, jax.tree.unflatten(structure, in_order), rest_gradients

  return gradient


def _tick(stage: Stage, table: Timetable) -> Callable:
  """Returns the body of the scan: one row of the timetable on one stage."""
  actions = {
    "forward": stage.forward,
    "backward": stage.backward,
    "input_gradient": stage.input_gradient,
    "weight_gradient": stage.weight_gradient,
  }
  used = [n for n in np.unique(table.action) if ACTIONS[n] != "idle"]
  decode = stage.codec.decode
  # Both rings for S = 3: activations go 0 -> 1 -> 2 -> 0, gradients go
  # 0 -> 2 -> 1 -> 0. The hop from 2 round to 0 carries something useful only
  # if stages hold several chunks: the output of stage 2's chunk 0 is the input
  # of stage 0's chunk 1. Otherwise it lands in a slot that nobody reads.
  down = [(s, (s + 1) % table.num_stages) for s in range(table.num_stages)]
  up = [(target, source) for source, target in down]

  def tick(state: StageState, at: TickNumbers) -> tuple[StageState, None]:
    # What neighbours sent at the end of the last tick is unpacked first, so an
    # action can read it in the same tick. 1F1B, S = 2: stage 0 runs F0 in tick
    # 0; stage 1 puts its output into slot 0 in tick 1 and runs F0 on it.
    dtype = state.activations.dtype
    activations = decode(state.activations_sent, dtype)
    gradients = decode(state.gradients_sent, dtype)
    state = state._replace(
      activations=put(state.activations, activations, at.activation_put),
      gradients=put(state.gradients, gradients, at.gradient_put),
    )
    # At most one of these conditions is true.
    for number in used:
      name = ACTIONS[number]
      state = when(at.action == number, name, actions[name], at, state)
    if table.num_stages > 1:
      # Every stage sends in every tick, because a collective needs all of
      # them. A stage that made nothing new passes on what it received last.
      sent = jax.lax.ppermute(state.activations_sent, STAGE_AXIS, down)
      gradients = jax.lax.ppermute(state.gradients_sent, STAGE_AXIS, up)
      state = state._replace(activations_sent=sent, gradients_sent=gradients)
    return state, None

  return tick


def stage_column(table: Timetable, number: Array) -> TickNumbers:
  """Returns one stage's column of the timetable; leaves [ticks].

  Args:
    table: Timetable of all stages, arrays [ticks, stages].
    number: Index of the stage.
  """
  fields = (getattr(table, name) for name in TickNumbers._fields)
  return TickNumbers(*(jnp.asarray(field)[:, number] for field in fields))


def _first_state(
  stage: Stage,
  table: Timetable,
  x_TxD: jax.ShapeDtypeStruct,
  totals: tuple[Tree, Tree],
) -> StageState:
  """Returns the state before the first tick: empty buffers and zero sums."""

  def buffers(tree: Tree, *slots: int) -> Tree:
    return jax.tree.map(
      lambda leaf: empty_buffer((*slots, *leaf.shape), leaf.dtype), tree
    )

  def zeros(x: Array | jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(x.shape, np.promote_types(np.float32, x.dtype))

  most = int(stage.counts.max())
  message = jax.eval_shape(stage.codec.encode, x_TxD)
  block_gradients, rest_gradients = jax.tree.map(zeros, totals)
  return StageState(
    # One slot more than the table uses, for arrays that nobody reads.
    activations=buffers(x_TxD, table.num_activation_slots + 1),
    gradients=buffers(x_TxD, table.num_gradient_slots + 1),
    activations_sent=buffers(message),
    gradients_sent=buffers(message),
    saved=buffers(stage.layer.saved, table.num_saved_slots, most),
    pairs=buffers(stage.layer.pairs, table.num_pair_slots, most),
    loss=zeros(jax.ShapeDtypeStruct((), x_TxD.dtype)),
    block_gradients=block_gradients,
    rest_gradients=rest_gradients,
  )


def empty_buffer(shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
  """Returns a buffer before it is written; no result depends on its values.

  Args:
    shape: Shape of the buffer.
    dtype: Type of its values.
  """
  return jnp.zeros(shape, dtype)
