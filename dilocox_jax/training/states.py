"""States of a run by phase: fresh ones, and the shapes of saved ones.

A checkpoint of a warm start and one of a round hold different trees; which,
is a matter of the phase alone.
"""

import jax

from dilocox_jax.outer.data_parallel import SharedState
from dilocox_jax.outer.round_program import RoundState
from dilocox_jax.pytypes import Tree
from dilocox_jax.training.build import Programs

State = SharedState | RoundState


def first_params(programs: Programs, phase: str, seed: int) -> Tree:
  """Parameters drawn from a seed; no device ever holds more than its part."""
  replicas = programs.replicas_of(phase)

  def draw() -> Tree:
    return programs.model.init(jax.random.key(seed))

  places = replicas.state_shardings(jax.eval_shape(draw), None)
  return jax.jit(draw, out_shardings=places)()


def fresh(programs: Programs, phase: str, params: Tree) -> State:
  """The state of a phase that starts from given parameters."""
  if phase != "local":
    return programs.steps_of(phase).init(params)
  start = programs.steps.optimizer.init
  shapes = jax.eval_shape(start, params)
  places = programs.replicas_of(phase).state_shardings(shapes, None)
  return programs.rounds.init(
    params, jax.jit(start, out_shardings=places)(params)
  )


def abstract(programs: Programs, phase: str) -> State:
  """Structure, shapes, types and placement of a phase's state."""
  params = jax.eval_shape(programs.model.init, jax.random.key(0))
  if phase == "local":
    optimizer = jax.eval_shape(programs.steps.optimizer.init, params)
    return programs.rounds.abstract(params, optimizer)
  return programs.steps_of(phase).abstract(params)
