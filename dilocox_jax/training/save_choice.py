"""Chooses the save from which processes without a common directory go on.

Every process holds the saves of its own replica alone. A save is whole for a
group if everyone in the group who took part in it still holds his part. Who
did not take part, or lost his directory, begins anew. Example, in which three
processes saved step 10 and step 20, but "b" was killed in the middle:

  directory    holds       its replica in step 10
  a            10, 20      0
  b            10          1
  c            10, 20      2

If all three come back, step 10 is chosen, from which all go on to the same
bits. If b does not come, or comes with an empty directory, it is step 20.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Save(NamedTuple):
  """A save of which a process holds its part.

  Attributes:
    step: Inner steps finished.
    group: Name of the group of processes. Two groups may save the same step.
    replica: Which replica the process has saved.
    members: Names of the directories of all who saved, by replica.
  """

  step: int
  group: str
  replica: int
  members: tuple[str, ...]

  @property
  def directory(self) -> str:
    """Name of the directory in which the part lies."""
    return self.members[self.replica]


def read_save(part: Mapping[str, Any]) -> Save:
  """Returns the save that JSON made of `Save._asdict`.

  Raises:
    ValueError: If a value is wrong; TypeError or KeyError if one is missing.
  """
  replica, members = int(part["replica"]), tuple(map(str, part["members"]))
  if not 0 <= replica < len(members):
    raise ValueError(f"there is no replica {replica} of {len(members)}")
  return Save(int(part["step"]), str(part["group"]), replica, members)


def chosen_save(
  held: Sequence[Sequence[Save]],
) -> tuple[int, list[int | None]] | None:
  """Chooses the newest save that is whole for a group.

  If none is, it is the newest of all.

  Args:
    held: Saves that every process of the group holds.

  Returns:
    Its step, and for every process the replica that it has saved, or None if it
    has no part in it. The result is None if nobody holds any save.
  """
  holders: dict[tuple[int, str], dict[int, Save]] = {}
  for process, saves in enumerate(held):
    for save in saves:
      holders.setdefault((save.step, save.group), {})[process] = save
  if not holders:
    return None
  present = {saves[0].directory for saves in held if saves}

  def rank(key: tuple[int, str]) -> tuple[bool, int, int, str]:
    parts = list(holders[key].values())
    expected = present.intersection(parts[0].members)
    return len(parts) == len(expected), key[0], len(parts), key[1]

  step, group = max(holders, key=rank)
  parts = holders[step, group]
  origins = [parts[n].replica if n in parts else None for n in range(len(held))]
  return step, origins


def order_of_processes(origins: Sequence[int | None]) -> list[int]:
  """Returns which process trains replica 0, 1, ... of a group.

  Who has a replica keeps it, or moves up to a number that is free. The new ones
  come last.

  Args:
    origins: Old replica of every process; None: it is new.
  """
  return sorted(
    range(len(origins)), key=lambda n: (origins[n] is None, origins[n] or 0)
  )
