"""States of a run: fresh ones by phase, and the shapes of saved ones.

A checkpoint of a warm start and one of a round hold different trees. The phase
alone decides which.
"""

import dataclasses

import jax

from dilocox_jax.outer.data_parallel import SharedState
from dilocox_jax.outer.round_program import RoundState
from dilocox_jax.pytypes import Tree
from dilocox_jax.training.build import Programs

TrainingState = SharedState | RoundState


@dataclasses.dataclass
class TrainingProgress:
  """How far a run is; part of every checkpoint's record.

  Attributes:
    step: Inner steps finished.
    tokens: Tokens that all replicas together have seen.
    total_sent_bytes: Bytes that one replica has sent.
    is_finished: Whether the flush and the last evaluation are done.
    simulated_s: Simulated seconds, if the run carries a clock.
  """

  step: int = 0
  tokens: int = 0
  total_sent_bytes: int = 0
  is_finished: bool = False
  simulated_s: float | None = None


def first_params(programs: Programs, phase: str, seed: int) -> Tree:
  """Draws parameters from a seed; a device never holds more than its shard."""
  replicas = programs.replicas_of(phase)

  def draw() -> Tree:
    return programs.model.init(jax.random.key(seed))

  places = replicas.state_shardings(jax.eval_shape(draw), None)
  return jax.jit(draw, out_shardings=places)()


def fresh(programs: Programs, phase: str, params: Tree) -> TrainingState:
  """Returns the state of a phase that starts from given parameters."""
  if phase != "local":
    return programs.steps_of(phase).init(params)
  start = programs.steps.optimizer.init
  shapes = jax.eval_shape(start, params)
  places = programs.replicas_of(phase).state_shardings(shapes, None)
  return programs.rounds.init(
    params, jax.jit(start, out_shardings=places)(params)
  )


def abstract(programs: Programs, phase: str) -> TrainingState:
  """Returns structure, shapes, types and placement of a phase's state."""
  params = jax.eval_shape(programs.model.init, jax.random.key(0))
  if phase == "local":
    optimizer = jax.eval_shape(programs.steps.optimizer.init, params)
    return programs.rounds.abstract(params, optimizer)
  return programs.steps_of(phase).abstract(params)
