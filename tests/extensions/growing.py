"""A schedule outside the package: rounds that grow longer.

Replicas differ most in the beginning, when the learning rate is high. So the
first rounds have H inner steps, and H doubles after every two rounds.
"""

import dataclasses
from collections.abc import Iterator

import dilocox_jax as dx


@dataclasses.dataclass(frozen=True)
class GrowingSchedule(dx.SyncSchedule):
  """Sends all parameters at once after rounds of H, H, 2 H, 2 H, 4 H ... steps.

  With H = 2 the rounds end after the steps 2, 4, 8, 12, 20, 28 and so on.
  """

  def round_at(self, step: int) -> tuple[int, int]:
    """Returns the index and the number of inner steps of a round."""
    return next(
      (index, end - start) for index, start, end in self._rounds() if end > step
    )

  def events(self, start: int, stop: int) -> list[dx.Event]:
    """Returns a send and its apply after the last step of every round."""
    found = []
    for _, _, end in self._rounds():
      if end > stop:
        break
      if end > start:
        found += [dx.Event(end, kind, 0, end) for kind in ("apply", "send")]
    return found

  def _rounds(self) -> Iterator[tuple[int, int, int]]:
    """Yields index, steps before and steps after every round, for ever."""
    index = start = 0
    while True:
      end = start + self.sync_interval * 2 ** (index // 2)
      yield index, start, end
      index, start = index + 1, end


def growing(sync_interval: int = 4) -> dx.Method:
  """Averages pseudo-gradients after rounds that grow longer.

  Args:
    sync_interval: H of the first two rounds (inner steps).
  """
  return dx.Method(GrowingSchedule(sync_interval))


def register() -> None:
  """Makes "growing" a name for `sync.method`."""
  dx.register_method(growing)
  dx.register_recipe("growing", {"outer.momentum": 0.9})
