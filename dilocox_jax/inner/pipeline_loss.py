"""Computes the loss of a model whose layers are spread over stages.

An evaluation needs no gradient, so the schedule's forwards alone are run, in
the order that training has. No stage keeps anything for later: an activation is
dropped as soon as the next chunk has read it.

Letters in names: T tokens, D model, K layers of a chunk.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dilocox_jax.inner.pipeline import empty_buffer, stage_column
from dilocox_jax.inner.pipeline_stage import (
  CutModel,
  StageInputs,
  TickNumbers,
  put,
  when,
)
from dilocox_jax.plan.model.division import STAGE_AXIS
from dilocox_jax.plan.pipeline.timeline import Pipeline
from dilocox_jax.plan.pipeline.timetable import ACTIONS, timetable
from dilocox_jax.trees import Index, Scalar, Tree

# (blocks, rest, tokens) -> this stage's contribution to the loss.
PipelinedLoss = Callable[[Tree, Tree, Array], Scalar]

_FORWARD = ACTIONS.index("forward")


def pipelined_loss(
  model: CutModel, pipeline: Pipeline, layer_counts: Sequence[Sequence[int]]
) -> PipelinedLoss:
  """Builds one stage's loss, for a region that is manual over the stages.

  Activations travel as they were computed, whatever training does with them, so
  the loss is that of the parameters.

  Args:
    model: The model.
    pipeline: Schedule of the training steps.
    layer_counts: Layers that each chunk of each stage holds: [stage][chunk].

  Returns:
    (blocks, rest, tokens) -> mean loss over the micro-batches, with arguments
    as in `pipeline.pipelined_gradient`. It is 0 except on the last stage, so
    the caller must sum it over the stages.
  """
  counts = np.asarray(layer_counts, np.int32)

  def loss(blocks: Tree, rest: Tree, tokens: Int[Array, "m b S"]) -> Scalar:
    table = timetable(pipeline.forward_only(tokens.shape[0]))
    number = jax.lax.axis_index(STAGE_AXIS)
    stage = _Stage(model, counts, number, blocks, rest, tokens)
    x_TxD = jax.eval_shape(model.embed, rest, tokens[0, :, :-1])
    # One slot more than the table uses, for arrays that nobody reads.
    inbox = (table.num_activation_slots + 1, *x_TxD.shape)
    state = _State(
      activations=empty_buffer(inbox, x_TxD.dtype),
      sent=empty_buffer(x_TxD.shape, x_TxD.dtype),
      loss=jnp.zeros((), np.promote_types(np.float32, x_TxD.dtype)),
    )
    ring = [(s, (s + 1) % table.num_stages) for s in range(table.num_stages)]

    def tick(state: _State, at: TickNumbers) -> tuple[_State, None]:
      inbox = put(state.activations, state.sent, at.activation_put)
      state = state._replace(activations=inbox)
      is_on = at.action == _FORWARD
      state = when(is_on, "forward", stage.forward, at, state)
      if table.num_stages > 1:
        sent = jax.lax.ppermute(state.sent, STAGE_AXIS, ring)
        state = state._replace(sent=sent)
      return state, None

    state, _ = jax.lax.scan(tick, state, stage_column(table, number))
    return state.loss / tokens.shape[0]

  return loss


def _multiply(path: str, x: Array, kernel: Array) -> Array:
  """Computes a product whose gradient nobody needs."""
  del path
  return jax.lax.dot(x, kernel)


class _State(NamedTuple):
  """The arrays that a stage holds between two ticks.

  Attributes:
    activations: Inbox [slots + 1, T, D], as in `StageState`.
    sent: Activations that arrived from the stage before, [T, D].
    loss: Sum of the losses of the micro-batches so far.
  """

  activations: Array
  sent: Array
  loss: Scalar


@dataclasses.dataclass(frozen=True, eq=False)
class _Stage(StageInputs):
  """A stage of an evaluation."""

  def forward(self, at: TickNumbers, state: _State) -> _State:
    """Runs a chunk's layers; the model's last chunk computes the loss."""
    length, context = self.tokens.shape[2] - 1, self.context(at)

    def body(row: Index, x_TxD: Array) -> Array:
      leaves = self.layer_leaves(at, row)
      return self.model.block(leaves, x_TxD, length, _multiply, **context)

    def head(at: TickNumbers, total: Scalar) -> Scalar:
      loss = self.model.loss(self.rest, x_TxD, self.targets(at))
      return total + loss.astype(total.dtype)

    x_TxD = self.loop(at, body, self.input(at, state.activations))
    loss = when(self.is_last(at), "head", head, at, state.loss)
    return _State(state.activations, x_TxD, loss)
