"""Creates the state of a run, and describes the shapes of a saved state.

A checkpoint of the warm start and a checkpoint of a round hold different trees.
Only the phase of the run decides which tree it is.
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
  """The progress of a run, which is part of every checkpoint's record.

  Attributes:
    step: Number of finished inner steps.
    tokens: Number of tokens that all replicas together have seen.
    total_sent_bytes: Number of bytes that one replica has sent.
    is_finished: Whether the flush and the last evaluation are done.
    simulated_s: Simulated time of the run (seconds), or None without a clock.
  """

  step: int = 0
  tokens: int = 0
  total_sent_bytes: int = 0
  is_finished: bool = False
  simulated_s: float | None = None


def first_params(programs: Programs, phase: str, seed: int) -> Tree:
  """Draws the first parameters. Each device creates only its own shard.

  Args:
    programs: Programs of the run.
    phase: Phase in which the run starts, which decides the placement.
    seed: Integer seed of the random parameters.
  """
  replicas = programs.replicas_of(phase)

  def draw() -> Tree:
    return programs.model.init(jax.random.key(seed))

  shardings = replicas.state_shardings(jax.eval_shape(draw), None)
  return jax.jit(draw, out_shardings=shardings)()


def fresh(programs: Programs, phase: str, params: Tree) -> TrainingState:
  """Returns the first state of a phase that starts from given parameters.

  Args:
    programs: Programs of the run.
    phase: "single", "data_parallel" or "local".
    params: Parameters of one replica, leaves [...].
  """
  if phase != "local":
    return programs.steps_of(phase).init(params)
  init_optimizer = programs.steps.optimizer.init
  shapes = jax.eval_shape(init_optimizer, params)
  shardings = programs.replicas_of(phase).state_shardings(shapes, None)
  optimizer = jax.jit(init_optimizer, out_shardings=shardings)(params)
  return programs.rounds.init(params, optimizer)


def abstract(programs: Programs, phase: str) -> TrainingState:
  """Returns the tree of a phase's state with shapes and types, but no values.

  Each leaf also has the sharding that the array must have.

  Args:
    programs: Programs of the run.
    phase: "single", "data_parallel" or "local".
  """
  params = jax.eval_shape(programs.model.init, jax.random.key(0))
  if phase == "local":
    optimizer = jax.eval_shape(programs.steps.optimizer.init, params)
    return programs.rounds.abstract(params, optimizer)
  return programs.steps_of(phase).abstract(params)
