"""Makes the first state of a phase, describes a saved one, and checks both.

A state is a `SharedState` during a warm start and a `RoundState` in the rounds.
The phase of the run alone decides which of the two a checkpoint holds.
"""

import dataclasses
import functools
import signal
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.distributed import coordinator_store, host_memory
from dilocox_jax.distributed.replicas import REPLICA_AXIS
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.rounds.data_parallel import SharedState
from dilocox_jax.rounds.states import RoundState
from dilocox_jax.training.build import Programs
from dilocox_jax.trees import Tree, all_finite

TrainingState = SharedState | RoundState


class NotFiniteError(RuntimeError):
  """A value that is not finite; the message says which and where."""


class TrainingStoppedError(RuntimeError):
  """The run cannot go on; the message says where and what to change."""


class StopRequestedError(Exception):
  """The run was asked to stop, and its state is saved.

  Attributes:
    signal: Number of the signal that asked for it.
  """

  def __init__(self, place: str, stop_signal: int):
    """Words the line for the user.

    Args:
      place: Step and directory.
      stop_signal: Number of the signal.
    """
    super().__init__(
      f"stopped by {signal.Signals(stop_signal).name}: saved at {place}; the "
      "same command goes on from there"
    )
    self.signal = stop_signal


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

  def draw() -> Tree:
    return programs.model.init(jax.random.key(seed))

  return _placed(programs, draw)


def _placed(programs: Programs, function: Callable, *args: Tree) -> Tree:
  """Calls a function in a program whose results replicas share."""
  shapes = jax.eval_shape(function, *args)
  shardings = programs.rounds.replicas.state_shardings(shapes, None)
  return jax.jit(function, out_shardings=shardings)(*args)


def fresh(programs: Programs, phase: str, params: Tree) -> TrainingState:
  """Returns the first state of a phase that starts from given parameters.

  Args:
    programs: Programs of the run.
    phase: "data_parallel" or "rounds".
    params: Parameters of one replica, leaves [...].
  """
  if phase != "rounds":
    return programs.steps.init(params)
  optimizer = _placed(programs, programs.steps.optimizer.init, params)
  return programs.rounds.init(params, optimizer)


def abstract(
  programs: Programs, phase: str, in_flight: Sequence[int] = ()
) -> TrainingState:
  """Returns shapes, types and shardings of the state that `fresh` returns.

  Args:
    programs: Programs of the run.
    phase: "data_parallel" or "rounds".
    in_flight: Number of pseudo-gradients in flight of every fragment (`Rounds
      .abstract`).
  """
  # `eval_shape` draws no numbers, so the seed of the key does not matter.
  params = jax.eval_shape(programs.model.init, jax.random.key(0))
  if phase != "rounds":
    return programs.steps.abstract(params)
  optimizer = jax.eval_shape(programs.steps.optimizer.init, params)
  return programs.rounds.states.abstract(params, optimizer, in_flight)


def shapes_of(programs: Programs) -> tuple[Tree, Tree]:
  """Returns shapes and types of parameters and inner optimizer of a replica.

  Args:
    programs: Programs of the run.
  """
  params = jax.eval_shape(programs.model.init, jax.random.key(0))
  optimizer = jax.eval_shape(programs.steps.optimizer.init, params)
  return params, optimizer


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
  if segment.participation and segment.participation.returning:
    assert isinstance(state, RoundState)
    leaves = jax.tree.leaves(state.replica)
    total += sum(leaf.nbytes // len(leaf) for leaf in leaves)
  return total


def num_in_flight(state: TrainingState) -> list[int]:
  """Returns how many pseudo-gradients of every fragment are in flight."""
  if isinstance(state, SharedState):
    return []
  return [len(fragment.in_flight) for fragment in state.fragments]


def is_finite(state: TrainingState) -> bool:
  """Whether every floating value of a state is finite; waits for it.

  Every process looks at what its own devices hold, and all tell each other.
  """
  own: dict[Any, list[Any]] = {}
  for leaf in jax.tree.leaves(state):
    for shard in leaf.addressable_shards:
      own.setdefault(shard.device, []).append(shard.data)
  finite = all(
    bool(_all_finite(host_memory.moved(arrays, host_memory.DEVICE)))
    for arrays in own.values()
  )
  return all(coordinator_store.allgather(finite))


_all_finite = jax.jit(all_finite)


def copies_are_equal(state: Tree) -> bool:
  """Whether replicas on devices of their own hold the same bits of what is one.

  Outer parameters and outer state are not sent. Every replica computes them,
  and they are equal as long as all devices compute alike. If one does not,
  replicas drift apart unnoticed and every later number is wrong. So the copies
  are compared before each checkpoint, by check sums that the devices compute.

  Args:
    state: Arrays. Those on a mesh whose sharding does not divide them among
      replicas are compared; the others need not be equal.
  """
  leaves = [x for x in jax.tree.leaves(state) if _is_shared(x.sharding)]
  if not leaves:
    return True
  mesh = leaves[0].sharding.mesh  # All leaves of a state have the same mesh.
  specs = tuple(leaf.sharding.spec for leaf in leaves)
  leaves = host_memory.moved(leaves, host_memory.DEVICE)
  sums = coordinator_store.arrays_to_host(_summing(mesh, specs)(leaves))
  return bool((sums == sums[0]).all())


def _is_shared(sharding: Sharding) -> bool:
  """Whether every replica has a copy on devices of its own."""
  if not isinstance(sharding, NamedSharding):
    return False
  has_replicas = REPLICA_AXIS in sharding.mesh.axis_names
  return has_replicas and REPLICA_AXIS not in jax.tree.leaves([*sharding.spec])


@functools.cache
def _summing(mesh: Any, specs: tuple[PartitionSpec, ...]) -> Callable:
  """Builds leaves -> sums [M] over the bits of each replica's copies."""
  inside = tuple(name for name in mesh.axis_names if name != REPLICA_AXIS)

  def replica_sum(leaves: list[Any]) -> jax.Array:
    total = sum((_sum_of_bits(leaf) for leaf in leaves), jnp.uint32(0))
    return jax.lax.psum(total, inside)[None]

  mapped = jax.shard_map(
    replica_sum,
    mesh=mesh,
    in_specs=(list(specs),),
    out_specs=PartitionSpec(REPLICA_AXIS),
    check_vma=False,
  )
  return jax.jit(mapped)


def _sum_of_bits(leaf: jax.Array) -> jax.Array:
  if leaf.dtype == jnp.bool_:
    leaf = leaf.astype(jnp.uint8)
  unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
  bits = jax.lax.bitcast_convert_type(leaf, unsigned)
  return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)
