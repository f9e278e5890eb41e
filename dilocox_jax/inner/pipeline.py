"""Computes the gradient of a model whose layers are spread over stages.

All stages of a replica run this one program. In every tick each stage looks up
its action in the timetable, runs it, and sends its newest results to its
neighbors. Forward and backward are ticks like any other, so the schedule alone
decides how many micro-batches' activations are alive at once. The program is a
scan over ticks around a loop over layers. It does not grow with the number of
ticks, layers or micro-batches.

Letters in names: T tokens, D model, K layers of a stage.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dilocox_jax.inner.pipeline_layer import LayerPasses, layer_passes
from dilocox_jax.inner.pipeline_stage import (
  CutModel,
  Stage,
  added,
  empty_buffer,
  get,
  put,
  when,
  zeros,
)
from dilocox_jax.plan.model.division import STAGE_AXIS
from dilocox_jax.plan.pipeline import ACTIONS, Pipeline, TickNumbers
from dilocox_jax.trees import Index, Scalar, Tree

# (blocks, rest, tokens) -> (loss, gradients of blocks, gradients of rest).
PipelinedGradient = Callable[[Tree, Tree, Array], tuple[Scalar, Tree, Tree]]


def pipelined_gradient(
  model: CutModel,
  pipeline: Pipeline,
  layer_counts: np.ndarray,
  *,
  remat: str = "dots",
) -> PipelinedGradient:
  """Builds one stage's gradient, for a region that is manual over the stages.

  Args:
    model: The model.
    pipeline: The schedule.
    layer_counts: Number of layers of each stage, [stages].
    remat: What a layer's forward saves for its backward: "none", "dots" or
      "full"; see `models.transformer`.

  Returns:
    (blocks, rest, tokens) -> (loss, block gradients, rest gradients).
    `blocks`: this stage's layers, leaves [K, ...], where K is the largest of
    all layer counts. The last rows of a shorter stage are not read. `rest`: all
    other leaves, whole. `tokens`: int32 [m, b, L + 1]. Results are means over
    the m micro-batches, in fp32 or wider. They are this stage's contribution:
    the caller must sum the loss and the rest gradients over the stages.
  """
  ticks = pipeline.timetable

  def gradient(blocks: Tree, rest: Tree, tokens: Int[Array, "m b S"]):
    x_TxD = jax.eval_shape(model.embed, rest, tokens[0, :, :-1])
    # Matrices are cast once, before the scan. If a forward cast its kernel, the
    # cast copy would be a residual and so be saved for every micro-batch.
    cast = jax.tree.map(
      lambda x: x.astype(x_TxD.dtype) if x.ndim > 2 else x, blocks
    )
    passes = layer_passes(
      model.block,
      jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], cast)),
      x_TxD,
      tokens.shape[2] - 1,
      remat,
      jax.eval_shape(model.context, tokens[0, :, :-1]),
    )
    number = jax.lax.axis_index(STAGE_AXIS)
    training = TrainingStage(
      model, layer_counts, number, cast, rest, tokens, passes
    )
    columns = jax.tree.map(lambda x: jnp.asarray(x)[:, number], ticks)
    state = _first_state(pipeline, training, x_TxD, (blocks, rest))
    state, _ = jax.lax.scan(_tick(training), state, columns)
    return jax.tree.map(
      lambda total: total / tokens.shape[0],
      (state.loss, state.block_gradients, state.rest_gradients),
    )

  return gradient


class StageState(NamedTuple):
  """The arrays that a stage holds between two ticks.

  Attributes:
    activations: The newest activations of this stage, [T, D].
    gradients: The newest gradient of this stage's input, [T, D].
    activations_arrived: Those of the stage before.
    gradients_arrived: That of the stage after.
    outputs: Outputs of forwards, [slots, T, D]; the last stage reads them.
    saved: Arrays from forwards for backwards; leaves [slots, K, ...].
    loss: Sum of the losses of the micro-batches so far.
    block_gradients: Sums of the layers' gradients; leaves [K, ...].
    rest_gradients: Sums of the gradients of all other leaves.
  """

  activations: Array
  gradients: Array
  activations_arrived: Array
  gradients_arrived: Array
  outputs: Array
  saved: list[Array]
  loss: Scalar
  block_gradients: Tree
  rest_gradients: Tree


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingStage(Stage):
  """A stage's actions in training, which take its state to the next one.

  Attributes:
    passes: Forward and backward of the model's block.
  """

  passes: LayerPasses

  def forward(self, at: TickNumbers, state: StageState) -> StageState:
    """Runs the stage's layers on a micro-batch."""
    context = self.context(at.micro_batch)

    def layer(row: Index, carry: tuple[Array, list[Array]]):
      x_TxD, saved = carry
      x_TxD, new = self.passes.forward(get(self.layers, row), x_TxD, context)
      return x_TxD, put(saved, new, at.saved_slot, row)

    x_TxD = self.input(at.micro_batch, state.activations_arrived)
    x_TxD, saved = self.loop(layer, (x_TxD, state.saved))
    return state._replace(
      saved=saved,
      outputs=put(state.outputs, x_TxD, at.output_slot),
      activations=x_TxD,
    )

  def backward(self, at: TickNumbers, state: StageState) -> StageState:
    """Computes gradients of a micro-batch, layer by layer.

    On the last stage they begin with the loss and the head.
    """
    last = self.count - 1

    def head(at: TickNumbers, carry: tuple[Array, Scalar, Tree]):
      _, total, totals = carry
      x_TxD = get(state.outputs, at.output_slot)
      loss, (rest, gradient) = jax.value_and_grad(self.model.loss, (0, 1))(
        self.rest, x_TxD, self.targets(at.micro_batch)
      )
      return gradient, added(total, loss), jax.tree.map(added, totals, rest)

    def layer(step: Index, carry: tuple[Array, Tree]):
      (gradient, totals), row = carry, last - step
      saved = get(state.saved, at.saved_slot, row)
      new, gradient = self.passes.backward(
        get(self.layers, row), saved, gradient
      )
      new = jax.tree.map(added, get(totals, row), new)
      return gradient, put(totals, new, row)

    def embed(at: TickNumbers, totals: Tree) -> Tree:
      _, pullback = jax.vjp(
        lambda rest: self.embed(rest, at.micro_batch), self.rest
      )
      return jax.tree.map(added, totals, *pullback(gradient))

    carry = state.gradients_arrived, state.loss, state.rest_gradients
    gradient, loss, rest = when(self.is_last, "head", head, at, carry)
    gradient, blocks = self.loop(layer, (gradient, state.block_gradients))
    return state._replace(
      gradients=gradient,
      loss=loss,
      block_gradients=blocks,
      rest_gradients=when(self.number == 0, "embed", embed, at, rest),
    )


def _tick(training: TrainingStage) -> Callable:
  """Returns the body of the scan: one row of the timetable on one self."""

  def tick(state: StageState, at: TickNumbers) -> tuple[StageState, None]:
    for name in ("forward", "backward"):
      is_on = at.action == ACTIONS.index(name)
      state = when(is_on, name, getattr(training, name), at, state)
    # Every stage sends in every tick, because a collective needs all of them.
    return state._replace(
      activations_arrived=training.sent(state.activations),
      gradients_arrived=training.sent(state.gradients, -1),
    ), None

  return tick


def _first_state(
  pipeline: Pipeline,
  training: TrainingStage,
  x_TxD: jax.ShapeDtypeStruct,
  params: tuple[Tree, Tree],
) -> StageState:
  """Returns the state before the first tick: empty buffers and zero sums."""

  def buffers(tree: Tree, *slots: int) -> Tree:
    return jax.tree.map(
      lambda leaf: empty_buffer((*slots, *leaf.shape), leaf.dtype), tree
    )

  most = int(training.counts.max())
  return StageState(
    *(buffers(x_TxD) for _ in range(4)),
    outputs=buffers(x_TxD, pipeline.num_output_slots),
    saved=buffers(training.passes.saved, pipeline.num_saved_slots, most),
    loss=zeros(jax.ShapeDtypeStruct((), x_TxD.dtype)),
    block_gradients=jax.tree.map(zeros, params[0]),
    rest_gradients=jax.tree.map(zeros, params[1]),
  )
