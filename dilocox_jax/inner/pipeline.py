"""Computes the gradient of a model that is divided into pipeline stages.

Each stage of a replica has some of the layers, but all stages run the same
program. A timetable (`plan.pipeline.TickNumbers`) has a row for every *tick*.
In a tick each stage runs its action (the forward or the backward of a
micro-batch, or none), and sends its newest results to the stages next to it.

The residual stream between two layers is called the stream, x. Letters in
shapes: m micro-batches of b sequences with L tokens each, S = L + 1 tokens
with the last target, T = b L tokens of a micro-batch, D width of the stream, K
the largest number of layers of a stage.
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
  WHOLE_LAYERS,
  CutModel,
  LayerTransfer,
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

# Function (blocks, rest, tokens) -> (loss, gradients of blocks, gradients of
# rest). A fourth argument, `transfer`, says how a device gets a whole layer if
# it holds only a part of it.
PipelinedGradient = Callable[..., tuple[Scalar, Tree, Tree]]


def pipelined_gradient(
  model: CutModel,
  pipeline: Pipeline,
  layer_counts: np.ndarray,
  *,
  remat: str = "dots",
) -> PipelinedGradient:
  """Builds the gradient function of one stage, for `shard_map` over the stages.

  Args:
    model: The model, cut into embedding, layers and loss.
    pipeline: The timetable of micro-batches.
    layer_counts: Number of layers of each stage, [stages].
    remat: What a layer's forward saves: "none", "dots" or "full"
      (`models.transformer.remat_wrapper`).

  Returns:
    Function (blocks, rest, tokens, transfer) -> (loss, block gradients, rest
    gradients).

    - `blocks`: this stage's layers, leaves [K, ...], where K is the largest
      number of layers of any stage. Shorter stages ignore the last rows.
    - `rest`: all leaves outside the layers, whole.
    - `tokens`: int32 [m, b, L + 1].
    - `transfer`: how a device gets a whole layer if `blocks` has only its part.
      Default: layers are whole.

    The results are means over the m micro-batches, in fp32 or wider. They are
    only this stage's contribution: the caller must sum the loss and the rest
    gradients over the stages. Block gradients are divided like `blocks`.
  """
  ticks = pipeline.timetable

  def gradient(
    blocks: Tree,
    rest: Tree,
    tokens: Int[Array, "m b S"],
    transfer: LayerTransfer = WHOLE_LAYERS,
  ) -> tuple[Scalar, Tree, Tree]:
    # Only the shape and the dtype of the stream.
    x_TxD = jax.eval_shape(model.embed, rest, tokens[0, :, :-1])
    # Matrices are cast once, before the scan. If a forward cast its kernel, the
    # cast copy would be a residual, and would be saved for every micro-batch.
    # With their layer axis, matrices have three axes or more.
    cast_blocks = jax.tree.map(
      lambda x: x.astype(x_TxD.dtype) if x.ndim > 2 else x, blocks
    )
    passes = layer_passes(
      block=model.block,
      # Shapes and dtypes of one whole layer.
      layer=jax.eval_shape(
        lambda: transfer.collect(jax.tree.map(lambda x: x[0], cast_blocks))
      ),
      x_TxD=x_TxD,
      length=tokens.shape[2] - 1,
      remat=remat,
      context=jax.eval_shape(model.context, tokens[0, :, :-1]),
    )
    number = jax.lax.axis_index(STAGE_AXIS)
    training = TrainingStage(
      model=model,
      counts=layer_counts,
      number=number,
      layers=cast_blocks,
      transfer=transfer,
      rest=rest,
      tokens=tokens,
      passes=passes,
    )
    # This stage's column of the timetable: its entry for each tick.
    columns = jax.tree.map(lambda x: jnp.asarray(x)[:, number], ticks)
    state = _first_state(pipeline, training, x_TxD=x_TxD, params=(blocks, rest))
    state, _ = jax.lax.scan(_tick(training), state, columns)
    return jax.tree.map(
      lambda total: total / tokens.shape[0],
      (state.loss, state.block_gradients, state.rest_gradients),
    )

  return gradient


class StageState(NamedTuple):
  """The arrays that a stage holds between two ticks (steps of the timetable).

  Attributes:
    activations: Output of this stage's last layer in its newest forward,
      [T, D].
    gradients: Gradient of the input of this stage's first layer in its newest
      backward, [T, D].
    activations_arrived: `activations` that the stage before has sent, [T, D].
    gradients_arrived: `gradients` that the next stage has sent, [T, D].
    outputs: `activations` of several micro-batches, by
      `TickNumbers.output_slot`, [slots, T, D]. Only the last stage reads them.
    saved: Arrays that forwards save for backwards, by `TickNumbers.saved_slot`
      and layer, leaves [slots, K, ...].
    loss: Sum of the losses of the micro-batches so far.
    block_gradients: Sums of the layers' gradients, leaves [K, ...].
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
  """A pipeline stage in training, with its two actions: forward and backward.

  Attributes:
    passes: Forward and backward of one layer.
  """

  passes: LayerPasses

  def forward(self, at: TickNumbers, state: StageState) -> StageState:
    """Runs the stage's layers on one micro-batch.

    The returned state has the stage's output in `activations` and in a slot of
    `outputs`, and arrays for the backward in a slot of `saved`. `at` has the
    numbers of the micro-batch and of its slots (places in these buffers).
    """
    context = self.context(at.micro_batch)

    def layer(
      row: Index, carry: tuple[Array, list[Array]]
    ) -> tuple[Array, list[Array]]:
      x_TxD, saved = carry
      x_TxD, saved_by_layer = self.passes.forward(
        self.whole_layer(row, x_TxD.dtype), x_TxD, context
      )
      return x_TxD, put(saved, saved_by_layer, at.saved_slot, row)

    x_TxD = self.input(at.micro_batch, state.activations_arrived)
    x_TxD, saved = self.loop(layer, (x_TxD, state.saved))
    return state._replace(
      saved=saved,
      outputs=put(state.outputs, x_TxD, at.output_slot),
      activations=x_TxD,
    )

  def backward(self, at: TickNumbers, state: StageState) -> StageState:
    """Computes the gradients of a micro-batch, from its loss to its input.

    The last stage begins with the loss, every other stage with the gradient
    that the next stage has sent. The first stage ends with the embedding. The
    returned state has new `gradients`, and the micro-batch's loss and gradients
    are added to the sums. `at` has the numbers of the micro-batch and of its
    slots (places in the buffers `outputs` and `saved`).
    """
    last_row = self.count - 1

    def head(
      at: TickNumbers, carry: tuple[Array, Scalar, Tree]
    ) -> tuple[Array, Scalar, Tree]:
      # No gradient has arrived: there is no next stage.
      _, loss_sum, gradient_sums = carry
      x_TxD = get(state.outputs, at.output_slot)
      loss, (rest_gradients, x_gradient) = jax.value_and_grad(
        self.model.loss, (0, 1)
      )(self.rest, x_TxD, self.targets(at.micro_batch))
      return (
        x_gradient,
        added(loss_sum, loss),
        jax.tree.map(added, gradient_sums, rest_gradients),
      )

    def layer(step: Index, carry: tuple[Array, Tree]) -> tuple[Array, Tree]:
      x_gradient, gradient_sums = carry
      row = last_row - step
      saved = get(state.saved, at.saved_slot, row)
      layer_gradients, x_gradient = self.passes.backward(
        self.whole_layer(row, x_gradient.dtype), saved, x_gradient
      )
      layer_gradients = self.transfer.reduce(layer_gradients)
      layer_sums = jax.tree.map(added, get(gradient_sums, row), layer_gradients)
      return x_gradient, put(gradient_sums, layer_sums, row)

    def embed(at: TickNumbers, gradient_sums: Tree) -> Tree:
      _, pullback = jax.vjp(
        lambda rest: self.embed(rest, at.micro_batch), self.rest
      )
      [rest_gradients] = pullback(input_gradient)
      return jax.tree.map(added, gradient_sums, rest_gradients)

    # `when` runs a function only on the stages on which its condition is true.
    # On other stages it returns `state`.
    carry = (state.gradients_arrived, state.loss, state.rest_gradients)
    output_gradient, loss_sum, rest_sums = when(
      self.is_last, "head", head, at=at, state=carry
    )
    input_gradient, block_sums = self.loop(
      layer, (output_gradient, state.block_gradients)
    )
    # `embed` reads `input_gradient`, which is known only now.
    rest_sums = when(self.number == 0, "embed", embed, at=at, state=rest_sums)
    return state._replace(
      gradients=input_gradient,
      loss=loss_sum,
      block_gradients=block_sums,
      rest_gradients=rest_sums,
    )


def _tick(training: TrainingStage) -> Callable:
  """Returns the body of the scan over ticks, the steps of the timetable.

  The body is (state, the stage's entries of the timetable) -> (state, None).
  """

  def tick(state: StageState, at: TickNumbers) -> tuple[StageState, None]:
    # `when` runs an action if its condition is true, else it returns `state`.
    is_forward = at.action == ACTIONS.index("forward")
    state = when(is_forward, "forward", training.forward, at=at, state=state)
    is_backward = at.action == ACTIONS.index("backward")
    state = when(is_backward, "backward", training.backward, at=at, state=state)
    # Every stage sends in every tick, because a collective needs all of them.
    state = state._replace(
      activations_arrived=training.exchange(state.activations),
      gradients_arrived=training.exchange(state.gradients, step=-1),
    )
    return state, None

  return tick


def _first_state(
  pipeline: Pipeline,
  training: TrainingStage,
  x_TxD: jax.ShapeDtypeStruct,
  params: tuple[Tree, Tree],
) -> StageState:
  """Returns the state before the first tick: empty buffers and zero sums.

  `params` is a tuple: this stage's layers, and all other parameters.
  """

  def buffers(tree: Tree, *slots: int) -> Tree:
    return jax.tree.map(
      lambda leaf: empty_buffer((*slots, *leaf.shape), leaf.dtype), tree
    )

  most_layers = int(training.counts.max())
  blocks, rest = params
  return StageState(
    activations=buffers(x_TxD),
    gradients=buffers(x_TxD),
    activations_arrived=buffers(x_TxD),
    gradients_arrived=buffers(x_TxD),
    outputs=buffers(x_TxD, pipeline.num_output_slots),
    saved=buffers(training.passes.saved, pipeline.num_saved_slots, most_layers),
    loss=zeros(jax.ShapeDtypeStruct((), x_TxD.dtype)),
    block_gradients=jax.tree.map(zeros, blocks),
    rest_gradients=jax.tree.map(zeros, rest),
  )
