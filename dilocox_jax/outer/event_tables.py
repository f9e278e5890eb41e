"""Tables of which fragment is sent or applied after an inner step.

A fragment is a part of the parameters. It is *sent* when its pseudo-gradient is
measured, and *applied* when the mean changes the parameters. The optax
transform of an inner step (`step_transform`) is compiled once for all steps. So
the number of the step is a traced value, by which the transform looks up the
fragment in a table (`EventTable`).
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from dilocox_jax.checks import require
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule
from dilocox_jax.trees import Index

# The tables are constants of a program, with four bytes for each inner step.
_MOST_STEPS = 2**20


@dataclasses.dataclass(frozen=True)
class EventTable:
  """Says which fragment is sent after each inner step, or which is applied.

  A fragment is a part of the parameters. It is sent when its pseudo-gradient is
  measured, and applied when the mean changes the parameters. There is one table
  for sending, and another one for applying.

  Attributes:
    first: For the first rounds, which may differ from each other. Entry s is
      the number of the fragment after inner step s of the run; -1: no fragment.
      int32 [steps of the first rounds + 1].
    repeated: For every later round. Entry 0 is the number of the fragment after
      the first inner step of the round, and so on; -1: no fragment. int32 [H].
  """

  first: np.ndarray
  repeated: np.ndarray

  def fragment_at(self, step: Index) -> Index:
    """Returns the number of the fragment sent (or applied) after a step, or -1.

    Args:
      step: Number of inner steps done (traced int32 scalar, at least 1).
    """
    num_first = len(self.first)
    # Step `num_first` is the first step of a round that repeats.
    in_round = jnp.asarray(self.repeated)[
      (step - num_first) % len(self.repeated)
    ]
    if num_first == 1:  # All rounds are alike.
      return in_round
    first = jnp.asarray(self.first)[jnp.minimum(step, num_first - 1)]
    return jnp.where(step < num_first, first, in_round)


def event_table(schedule: SyncSchedule, kind: str) -> EventTable:
  """Returns the table of a schedule's sends, or of its applies.

  Args:
    schedule: Says after which inner steps fragments are sent and applied.
    kind: "send" or "apply".

  Raises:
    ValueError: If the schedule does not say from which round on its rounds are
      alike, if they become alike only after more than a million steps, or if
      two fragments are sent (or applied) after the same step.
  """
  require(
    schedule.steady_round is not None,
    "a transform of single steps must know from which round on all rounds are "
    "alike: let the schedule state steady_round, or take "
    "dilocox_jax.make_rounds",
  )
  # All rounds after inner step `start` are alike, and have `interval` steps.
  start = schedule.steady_step
  _, interval = schedule.round_at(start)
  num_steps = start + interval
  require(
    num_steps <= _MOST_STEPS,
    f"the rounds of this schedule become alike after more than {_MOST_STEPS} "
    "inner steps, which is too late for a transform of single steps: take "
    "dilocox_jax.make_rounds",
  )
  table = np.full(num_steps + 1, -1, np.int32)
  for event in schedule.events(0, num_steps):
    if event.kind == kind:
      require(
        table[event.step] < 0,
        f"this schedule has more than one {kind} after inner step "
        f"{event.step}, and a transform of single steps needs one at most: take"
        " dilocox_jax.make_rounds",
      )
      table[event.step] = event.fragment
  return EventTable(first=table[: start + 1], repeated=table[start + 1 :])
