"""Builds the first state of each phase, and describes saved states.

A checkpoint of a warm start holds another tree than a checkpoint of a round.
The phase alone decides which tree it is.
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
  """How far a run has got. Every checkpoint's record holds it.

  Attributes:
    step: Inner steps finished.
    tokens: Tokens that all replicas together have seen.
    total_sent_bytes: Bytes that one replica has sent.
    is_finished: Whether the flush and the last evaluation are done.
    simulated_s: Simulated time since the start (seconds); None without a clock.
  """

  step: int = 0
  tokens: int = 0
  total_sent_bytes: int = 0
  is_finished: bool = False
  simulated_s: float | None = None


def first_params(programs: Programs, phase: str, seed: int) -> Tree:
  """Draws the first parameters of a run from its seed.

  Each device draws only its own shard, so it never holds more than that.

  Args:
    programs: Programs of the run.
    phase: First phase of the run, which decides how parameters are sharded.
    seed: Integer seed of the parameters.

  Returns:
    Parameters of one model, without a replica axis.
  """
  replicas = programs.replicas_of(phase)

  def draw() -> Tree:
    return programs.model.init(jax.random.key(seed))

  shardings = replicas.state_shardings(jax.eval_shape(draw), None)
  return jax.jit(draw, out_shardings=shardings)()


def fresh(programs: Programs, phase: str, params: Tree) -> TrainingState:
  """Returns the first state of a phase that starts from these parameters."""
  if phase != "local":
    return programs.steps_of(phase).init(params)
  init_optimizer = programs.steps.optimizer.init
  shapes = jax.eval_shape(init_optimizer, params)
  shardings = programs.replicas_of(phase).state_shardings(shapes, None)
  optimizer = jax.jit(init_optimizer, out_shardings=shardings)(params)
  return programs.rounds.init(params, optimizer)


def abstract(programs: Programs, phase: str) -> TrainingState:
  """Returns the structure, shapes, types and shardings of a phase's state."""
  params = jax.eval_shape(programs.model.init, jax.random.key(0))
  if phase == "local":
    optimizer = jax.eval_shape(programs.steps.optimizer.init, params)
    return programs.rounds.abstract(params, optimizer)
  return programs.steps_of(phase).abstract(params)
