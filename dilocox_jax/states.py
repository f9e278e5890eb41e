"""States of a run by phase: fresh ones, and the shapes of saved ones.

A checkpoint of a warm start and one of a round hold different trees; which,
is a matter of the phase alone.
"""

import jax

from dilocox_jax.assembly import Programs
from dilocox_jax.outer.data_parallel import SharedState
from dilocox_jax.outer.round import RoundState
from dilocox_jax.pytypes import Tree

State = SharedState | RoundState


def fresh(programs: Programs, phase: str, params: Tree) -> State:
  """The state of a phase that starts from given parameters."""
  if phase == "local":
    optimizer = programs.steps.optimizer
    return programs.rounds.init(params, jax.jit(optimizer.init)(params))
  return programs.steps_of(phase).init(params)


def abstract(programs: Programs, phase: str) -> State:
  """Structure, shapes, types and placement of a phase's state."""
  params = jax.eval_shape(programs.model.init, jax.random.key(0))
  if phase == "local":
    optimizer = jax.eval_shape(programs.steps.optimizer.init, params)
    return programs.rounds.abstract(params, optimizer)
  return programs.steps_of(phase).abstract(params)
