"""How many inner steps each message of a replica stands for.

A replica that joins in the middle of a round has taken fewer inner steps when
it sends its first message. Its weight in the mean is the work that it has done.

For example a fragment is sent every 6 steps, and a replica joins 3 steps before
that. Its message has the weight of 3 steps beside messages of 6 steps:

    mean = (6 * 12 + 3 * 6) / (6 + 3) = 10

A replica may add values to its message that an earlier message did not carry.
Their steps do not count again: the weight of a message counts only the steps
since the fragment was measured last.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any


class StepCounts:
  """Counts the inner steps of one replica for each fragment.

  The calls follow the replica's schedule: `add` inner steps, `measure` a
  fragment, `take` the count of its oldest measurement when it is exchanged.
  """

  def __init__(self) -> None:
    """Begins with nothing done and nothing in flight."""
    self._done = 0
    self._measured_at: dict[int, int] = {}
    self._in_flight: dict[int, list[int]] = collections.defaultdict(list)

  def restart(self, num_in_flight: Sequence[int]) -> None:
    """Begins anew, after the replica has taken the state of a snapshot.

    Args:
      num_in_flight: Number of exchanges in flight, by fragment. This replica
        has no part in them.
    """
    self._done = 0
    self._measured_at = {}
    self._in_flight = collections.defaultdict(list)
    for fragment, count in enumerate(num_in_flight):
      self._in_flight[fragment] = [0] * count

  def add(self, num_steps: int) -> None:
    """Adds inner steps that the replica has taken."""
    self._done += num_steps

  def measure(self, fragment: int) -> None:
    """Notes that the pseudo-gradient of a fragment is measured now."""
    num_steps = self._done - self._measured_at.get(fragment, 0)
    self._in_flight[fragment].append(num_steps)
    self._measured_at[fragment] = self._done

  def take(self, fragment: int) -> int:
    """Returns the inner steps behind a fragment's oldest measurement."""
    return self._in_flight[fragment].pop(0)

  def get_state(self) -> dict[str, Any]:
    """Returns the counts for `set_state`, as values of JSON."""
    return {
      "done": self._done,
      "measured_at": {str(k): n for k, n in self._measured_at.items()},
      "in_flight": {str(k): list(v) for k, v in self._in_flight.items()},
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Restores the counts that `get_state` returned."""
    self._done = int(state["done"])
    self._measured_at = {int(k): n for k, n in state["measured_at"].items()}
    self._in_flight = collections.defaultdict(list)
    for fragment, counts in state["in_flight"].items():
      self._in_flight[int(fragment)] = list(counts)
