"""Says which fragment is sent or applied after an inner step of a program.

The program of one inner step is the same for all steps, so its step is data. It
looks up the fragment in two tables: one of the first rounds, which may differ,
and one of a round that repeats for ever.
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
  """The fragments of one kind of event, by inner step.

  Attributes:
    first: Fragment after inner steps 0, 1, 2, ... up to the step at which
      rounds begin to repeat; -1: there is no event. int32 [steps + 1].
    repeated: Fragment after steps 1, 2, 3, ... of a round that repeats, in the
      same way. int32 [H].
  """

  first: np.ndarray
  repeated: np.ndarray

  def fragment_at(self, step: Index) -> Index:
    """Returns the number of the fragment after a step; -1 if there is none.

    Args:
      step: Number of inner steps done (traced, at least 1).
    """
    num_first = len(self.first)
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
    schedule: The schedule.
    kind: "send" or "apply".

  Raises:
    ValueError: If the schedule does not say from which round on its rounds are
      alike, if more than one fragment has such an event after one step, or if
      the rounds become alike too late.
  """
  require(
    schedule.steady_round is not None,
    "a transform of single steps must know from which round on all rounds are "
    "alike: let the schedule state steady_round, or take "
    "dilocox_jax.make_rounds",
  )
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
