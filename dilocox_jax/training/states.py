"""Makes the first state of a phase, and the shapes of a saved state.

A state is a `SharedState` during a warm start and a `RoundState` in the rounds.
The phase of the run alone decides which of the two a checkpoint holds.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.outer.data_parallel import SharedState
from dilocox_jax.outer.round_states import RoundState
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.training.build import Programs
from dilocox_jax.trees import Tree

TrainingState = SharedState | RoundState


@dataclasses.dataclass(frozen=True)
class TrainingProgress:
  """Says how far a run has come. Every checkpoint contains it.

  Attributes:
    step: Number of finished inner steps.
    tokens: Number of tokens that all replicas together have seen.
    total_sent_bytes: Number of bytes that one replica has sent.
    is_finished: Whether the flush and the last evaluation are done.
    simulated_s: Simulated time since the start (seconds); None if the run has
      no clock.
  """

  step: int = 0
  tokens: int = 0
  total_sent_bytes: int = 0
  is_finished: bool = False
  simulated_s: float | None = None

  def after(self, sent_bytes: int = 0, **changes: Any) -> "TrainingProgress":
    """Returns the progress after so many more bytes, and other changes."""
    total = self.total_sent_bytes + sent_bytes
    return dataclasses.replace(self, total_sent_bytes=total, **changes)


def first_params(programs: Programs, seed: int) -> Tree:
  """Returns random parameters of the model on the devices of the replicas.

  The program draws every shard on the device that keeps it, so no device ever
  holds all parameters of a divided replica.

  Args:
    programs: Programs of the run.
    seed: Integer seed of the random parameters.
  """
  replicas = programs.rounds.replicas

  def draw() -> Tree:
    return programs.model.init(jax.random.key(seed))

  shardings = replicas.state_shardings(jax.eval_shape(draw), None)
  return jax.jit(draw, out_shardings=shardings)()


def fresh(programs: Programs, phase: str, params: Tree) -> TrainingState:
  """Returns the first state of a phase that starts from given parameters.

  Args:
    programs: Programs of the run.
    phase: "data_parallel" or "rounds".
    params: Parameters of one replica, leaves [...].
  """
  if phase != "rounds":
    return programs.steps.init(params)
  init = programs.steps.optimizer.init
  shapes = jax.eval_shape(init, params)
  shardings = programs.rounds.replicas.state_shardings(shapes, None)
  return programs.rounds.init(
    params, jax.jit(init, out_shardings=shardings)(params)
  )


def abstract(
  programs: Programs,
  phase: str,
  num_replicas: int | None = None,
  in_flight: Sequence[int] = (),
) -> TrainingState:
  """Returns shapes, types and shardings of the state that `fresh` returns.

  Args:
    programs: Programs of the run.
    phase: "data_parallel" or "rounds".
    num_replicas: If given, rounds are those of so many replicas, and every
      device of the run holds their whole state.
    in_flight: Number of pseudo-gradients in flight of every fragment (`Rounds
      .abstract`).
  """
  if phase == "rounds" and num_replicas is not None:
    stacked = dataclasses.replace(
      programs.rounds, replicas=Replicas(num_replicas)
    )
    others = dataclasses.replace(programs, rounds=stacked)
    replicas = programs.rounds.replicas
    state = abstract(others, phase, in_flight=in_flight)
    return replicas.abstract(state, None)
  # `eval_shape` draws no numbers, so the seed of the key does not matter.
  params = jax.eval_shape(programs.model.init, jax.random.key(0))
  if phase == "rounds":
    optimizer = jax.eval_shape(programs.steps.optimizer.init, params)
    return programs.rounds.abstract(params, optimizer, in_flight)
  return programs.steps.abstract(params)


def segment_sent_bytes(
  traffic: Traffic, segment: Segment, state: TrainingState
) -> int:
  """Returns the bytes that a replica sends in a segment.

  They are those of its exchanges, and of the copies with which replicas begin
  after an absence.

  Args:
    traffic: Bytes of the exchanges.
    segment: The segment.
    state: State after it.
  """
  total = traffic.segment_bytes(segment)
  if segment.attendance and segment.attendance.returning:
    assert isinstance(state, RoundState)
    leaves = jax.tree.leaves(state.replica)
    total += sum(leaf.nbytes // len(leaf) for leaf in leaves)
  return total


def num_in_flight(state: TrainingState) -> list[int]:
  """Returns how many pseudo-gradients of every fragment are in flight."""
  if isinstance(state, SharedState):
    return []
  return [len(fragment.in_flight) for fragment in state.fragments]
