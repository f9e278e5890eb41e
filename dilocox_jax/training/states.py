"""Builds and checks the state of a run in each of its phases.

A run has one or two phases. In the phase "data_parallel" the replicas average
their gradients in each step, and the state is a `SharedState`. In the phase
"rounds" the state is a `RoundState`. If a run has both phases, "data_parallel"
comes first.
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
  """Raised if a value is not finite. The message says which value and where."""


class TrainingStoppedError(RuntimeError):
  """Raised if a run cannot continue. The message says why."""


class StopRequestedError(Exception):
  """Raised if a run was asked to stop, after its state was saved.

  Attributes:
    signal: Number of the signal that asked the run to stop.
  """

  def __init__(self, saved_at: str, stop_signal: int):
    """Writes the message: the signal, and where the state is saved."""
    super().__init__(
      f"stopped by {signal.Signals(stop_signal).name}: saved at {saved_at}; "
      "the same command goes on from there"
    )
    self.signal = stop_signal


@dataclasses.dataclass(frozen=True)
class TrainingProgress:
  """How far a run has come. Every checkpoint contains it.

  Attributes:
    step: Number of finished inner steps.
    tokens: Number of tokens (or examples) on which all replicas of this program
      together were trained.
    total_sent_bytes: Computed number of bytes that one replica has sent.
    is_finished: Whether the exchanges that end the run (the flush) and the last
      evaluation are done.
    simulated_s: Simulated time since the start (seconds); None if the run
      simulates no time.
  """

  step: int = 0
  tokens: int = 0
  total_sent_bytes: int = 0
  is_finished: bool = False
  simulated_s: float | None = None

  def after(self, sent_bytes: int = 0, **changes: Any) -> "TrainingProgress":
    """Returns a copy with `sent_bytes` added to `total_sent_bytes`.

    `changes` are new values of other fields.
    """
    total_sent_bytes = self.total_sent_bytes + sent_bytes
    return dataclasses.replace(
      self, total_sent_bytes=total_sent_bytes, **changes
    )


def first_params(programs: Programs, seed: int) -> Tree:
  """Draws the parameters with which a run starts, on the replicas' devices.

  If only a part of the model is trained, the result is the first values of this
  part (`Adaptation.init`). Every shard is made on its own device. So if a
  replica is divided among devices, no device holds all of its parameters.
  """

  def draw() -> Tree:
    return programs.model.init(jax.random.key(seed))

  return _run_with_shared_result(programs, draw)


def _run_with_shared_result(
  programs: Programs, function: Callable, *args: Tree
) -> Tree:
  """Compiles and calls a function whose result all replicas share."""
  shapes = jax.eval_shape(function, *args)
  shardings = programs.rounds.replicas.state_shardings(shapes, None)
  return jax.jit(function, out_shardings=shardings)(*args)


def fresh(programs: Programs, phase: str, params: Tree) -> TrainingState:
  """Returns the first state of a phase that starts from given parameters.

  The phase is "data_parallel" or "rounds". The parameters have no replica axis.
  """
  if phase != "rounds":
    return programs.steps.init(params)
  optimizer = _run_with_shared_result(
    programs, programs.steps.optimizer.init, params
  )
  return programs.rounds.init(params, optimizer)


def abstract(
  programs: Programs, phase: str, in_flight: Sequence[int] = ()
) -> TrainingState:
  """Returns shapes, types and shardings of a phase's state.

  Args:
    programs: Programs of the run.
    phase: "data_parallel" or "rounds".
    in_flight: For each fragment (a part of the parameters), the number of
      pseudo-gradients whose means are not applied yet; empty: none.
  """
  # `eval_shape` draws no numbers, so the seed of the key does not matter.
  params = jax.eval_shape(programs.model.init, jax.random.key(0))
  if phase != "rounds":
    return programs.steps.abstract(params)
  optimizer = jax.eval_shape(programs.steps.optimizer.init, params)
  return programs.rounds.states.abstract(params, optimizer, in_flight)


def shapes_of(programs: Programs) -> tuple[Tree, Tree]:
  """Returns shapes and types of a replica's parameters and optimizer state.

  The parameters are the trained ones, and the optimizer is the inner one.
  """
  params = jax.eval_shape(programs.model.init, jax.random.key(0))
  optimizer = jax.eval_shape(programs.steps.optimizer.init, params)
  return params, optimizer


def segment_sent_bytes(
  traffic: Traffic, segment: Segment, state: TrainingState
) -> int:
  """Returns the bytes that a replica sends in a segment, e.g. a round.

  If any replicas return after an absence, the size of one replica's parameters
  and inner optimizer state is added. The copy that they get is counted as a
  broadcast, in which a replica passes the state on once.
  """
  sent_bytes = traffic.segment_bytes(segment)
  if segment.participation and segment.participation.returning:
    assert isinstance(state, RoundState)
    for leaf in jax.tree.leaves(state.replica):
      num_replicas = leaf.shape[0]
      sent_bytes += leaf.nbytes // num_replicas
  return sent_bytes


def num_in_flight(state: TrainingState) -> list[int]:
  """Returns how many pseudo-gradients of each fragment are in flight.

  A fragment is a part of the parameters. A pseudo-gradient is in flight from
  its measurement until its mean over the replicas is applied. The list is empty
  for a `SharedState`.
  """
  if isinstance(state, SharedState):
    return []
  return [len(fragment.in_flight) for fragment in state.fragments]


def is_finite(state: TrainingState) -> bool:
  """Waits for a state, and returns whether all its floats are finite.

  All processes must call this function. All return the same result.
  """
  shards_by_device: dict[Any, list[Any]] = {}
  for leaf in jax.tree.leaves(state):
    for shard in leaf.addressable_shards:
      shards_by_device.setdefault(shard.device, []).append(shard.data)
  is_finite_here = all(
    bool(_all_finite(host_memory.moved(shards, host_memory.DEVICE)))
    for shards in shards_by_device.values()
  )
  return all(coordinator_store.allgather(is_finite_here))


_all_finite = jax.jit(all_finite)


def copies_are_equal(state: Tree) -> bool:
  """Whether all replicas have equal copies of the arrays that they share.

  The copies are compared by checksums. They differ if the replicas' devices
  have not computed the same values. All processes must call this function.

  Args:
    state: Tree of arrays. An array is compared only if its sharding has a mesh
      with an axis of replicas, and does not divide the array along this axis.
  """
  leaves = [
    leaf for leaf in jax.tree.leaves(state) if _is_shared(leaf.sharding)
  ]
  if not leaves:
    return True
  mesh = leaves[0].sharding.mesh  # All leaves of a state have the same mesh.
  specs = tuple(leaf.sharding.spec for leaf in leaves)
  leaves = host_memory.moved(leaves, host_memory.DEVICE)
  sums = coordinator_store.arrays_to_host(_bit_sums(mesh, specs)(leaves))
  return bool((sums == sums[0]).all())


def _is_shared(sharding: Sharding) -> bool:
  """Whether a sharding gives each replica its own copy of an array.

  Without a mesh that has a replica axis, the result is False.
  """
  if not isinstance(sharding, NamedSharding):
    return False
  has_replicas = REPLICA_AXIS in sharding.mesh.axis_names
  return has_replicas and REPLICA_AXIS not in jax.tree.leaves([*sharding.spec])


@functools.cache
def _bit_sums(mesh: Any, specs: tuple[PartitionSpec, ...]) -> Callable:
  """Builds the program that computes a checksum of each replica's arrays.

  The program gets a list of arrays, divided over `mesh` as `specs` say. It
  returns checksums [M], uint32: one for all arrays of a replica together.
  """
  axes_within_replica = tuple(
    name for name in mesh.axis_names if name != REPLICA_AXIS
  )

  def replica_sum(leaves: list[Any]) -> jax.Array:
    total = sum((_sum_of_bits(leaf) for leaf in leaves), jnp.uint32(0))
    return jax.lax.psum(total, axes_within_replica)[None]

  mapped = jax.shard_map(
    replica_sum,
    mesh=mesh,
    in_specs=(list(specs),),
    out_specs=PartitionSpec(REPLICA_AXIS),
    check_vma=False,
  )
  return jax.jit(mapped)


def _sum_of_bits(leaf: jax.Array) -> jax.Array:
  """Returns the sum of an array's values modulo 2^32, as a uint32 scalar.

  The bits of each value are read as an unsigned integer of the same size.
  """
  if leaf.dtype == jnp.bool_:
    leaf = leaf.astype(jnp.uint8)
  unsigned = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
  bits = jax.lax.bitcast_convert_type(leaf, unsigned)
  return bits.astype(jnp.uint32).sum(dtype=jnp.uint32)
