"""Numbers read off a state or a segment, for the records."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from dilocox_jax.distributed import host_memory
from dilocox_jax.outer.data_parallel import SharedState
from dilocox_jax.outer.drift import Drift, by_window, disagreement
from dilocox_jax.outer.programs import mean_of
from dilocox_jax.plan.schedule.run_plan import Segment
from dilocox_jax.plan.wire.ranks import measured_rank, spectra_of
from dilocox_jax.pytypes import Boolean, Tree
from dilocox_jax.training.build import Programs
from dilocox_jax.training.states import TrainingState
from dilocox_jax.trees import all_finite


def losses(
  programs: Programs, state: TrainingState, batches
) -> dict[str, float]:
  """Validation losses of the three views of a state, in nats a token.

  Args:
    programs: The run's programs.
    state: TrainingState of all replicas.
    batches: Held-out tokens [N, B, L + 1]. Where they lie, the loss is
      computed: on one device, or by all devices of a mesh.

  Returns:
    "outer_loss" (outer parameters), "mean_loss" (the replicas' mean),
    "replica_loss" (replica 0).
  """
  views = _views(programs, state)
  values = {}
  for params in views.values():
    if id(params) not in values:  # A warm start has one view three times.
      here = _where(params, batches)
      values[id(params)] = float(programs.evaluate(here, batches))
  return {f"{name}_loss": values[id(p)] for name, p in views.items()}


def _where(params: Tree, batches: jax.Array) -> Tree:
  """Parameters on the devices of the batches; divided ones stay divided."""
  devices = batches.sharding.device_set
  leaves = jax.tree.leaves(params)
  if all(leaf.sharding.device_set == devices for leaf in leaves):
    return params
  return jax.device_put(params, batches.sharding)


def _views(programs: Programs, state: TrainingState) -> dict[str, Tree]:
  if isinstance(state, SharedState):
    return dict.fromkeys(("outer", "mean", "replica"), state.params)
  inner = state.replica.params
  return {
    "outer": programs.rounds.outer_params(state),
    "mean": mean_of(inner),
    "replica": _first(inner),
  }


@jax.jit
def _first(tree: Tree) -> Tree:
  return jax.tree.map(lambda leaf: leaf[0], tree)


def is_finite(state: TrainingState) -> bool:
  """Whether every floating value of a state is finite; waits for it."""
  return bool(_all_finite(state))


@jax.jit
def _all_finite(state: TrainingState) -> Boolean:
  return all_finite(host_memory.on_device(state))


def first_not_finite(*values: ArrayLike) -> tuple[int, int] | None:
  """(replica, step) of the earliest value that is not finite, if any.

  Args:
    *values: Arrays [M, num_steps].
  """
  bad = np.asarray(~np.isfinite(np.stack(values)).all(axis=0))
  if not bad.any():
    return None
  step = int(np.argmax(bad.any(axis=0)))
  return int(np.argmax(bad[:, step])), step


def drift_rows(
  segment: Segment, drifts: Sequence[Drift], energy_share: float
) -> list[dict[str, Any]]:
  """Drifts by event, in the order of the segment's arrivals.

  Args:
    segment: What was run.
    drifts: For every piece with an arrival what was reported.
    energy_share: Of an update's energy, by which its rank is counted.
  """
  arrivals = [w.applied for w in segment.windows if w.applied]
  seen = [each for drift in drifts for each in by_window(drift)]
  return [
    {
      "fragment": event.fragment,
      "step": event.send_step + segment.schedule_start,
      **disagreement(*sums)._asdict(),
      **_ranks(observed, energy_share),
    }
    for event, (*sums, observed) in zip(arrivals, seen, strict=True)
  ]


def _ranks(grams: dict[str, Any], energy_share: float) -> dict[str, float]:
  """What factors say of the update, if it was sent as low-rank factors."""
  spectra = spectra_of(grams)
  if not spectra:
    return {}
  return {
    "rank": float(np.mean([each.shape[1] for each in spectra.values()])),
    "energy_rank": measured_rank(spectra, "energy", energy_share),
    "stable_rank": measured_rank(spectra, "stable", energy_share),
  }
