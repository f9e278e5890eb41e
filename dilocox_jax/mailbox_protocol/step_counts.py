"""Counts the inner steps that each message of a replica stands for.

The weight of a message in the mean is proportional to this number. A replica
that joins in the middle of a round has taken fewer steps than the others when
it sends its first message.

For example, a fragment is exchanged after every 6 steps, and a second replica
joins 3 steps before an exchange. Then the first replica sends the value 12 with
the weight 6, and the second one sends the value 6 with the weight 3:

    mean = (6 * 12 + 3 * 6) / (6 + 3) = 10

A message stands only for the steps between its own pseudo-gradient and the
previous one of the same fragment. If it also carries values that the codec left
out of an earlier message, they add no steps.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any


class StepCounts:
  """Counts the inner steps of one replica for each fragment.

  The caller calls `add` with each number of inner steps, `measure` when it
  measures the pseudo-gradient of a fragment, and `take` when it exchanges the
  oldest measurement of the fragment.
  """

  def __init__(self) -> None:
    """Begins with no inner steps, and no measurement for `take`."""
    self._done = 0
    self._measured_at: dict[int, int] = {}
    self._in_flight: dict[int, list[int]] = collections.defaultdict(list)

  def restart(self, num_in_flight: Sequence[int]) -> None:
    """Sets all counts to 0, after the replica has taken over a snapshot.

    A snapshot is a copy of the state that all replicas share.

    Args:
      num_in_flight: For each fragment, how many of its measurements in the
        snapshot were not applied yet. `take` returns 0 for them.
    """
    self._done = 0
    self._measured_at = {}
    self._in_flight = collections.defaultdict(list)
    for fragment, count in enumerate(num_in_flight):
      self._in_flight[fragment] = [0] * count

  def add(self, num_steps: int) -> None:
    """Adds inner steps of the replica to the count."""
    self._done += num_steps

  def measure(self, fragment: int) -> None:
    """Notes that a fragment's pseudo-gradient is measured now.

    The steps since the fragment's last measurement are kept for `take`.
    """
    num_steps = self._done - self._measured_at.get(fragment, 0)
    self._in_flight[fragment].append(num_steps)
    self._measured_at[fragment] = self._done

  def take(self, fragment: int) -> int:
    """Returns how many inner steps a fragment's next message stands for.

    They are the steps of the oldest measurement that `take` has not returned.

    Raises:
      IndexError: If there is no such measurement.
    """
    return self._in_flight[fragment].pop(0)

  def get_state(self) -> dict[str, Any]:
    """Returns the counts for a checkpoint, as values of JSON."""
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
