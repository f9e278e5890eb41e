"""Cores of this machine, dealt out to processes that work side by side.

XLA starts a thread a core. Two processes with two threads each on two cores
wait for each other far more than they work: training `tiny` twice at once is
nearly twice as fast with a core each (docs/log.md).
"""

import os


def divided(count: int) -> list[list[int]]:
  """Cores of each process; all of them for each if they do not go round.

  Args:
    count: Processes.
  """
  cores = _usable()
  share = len(cores) // count
  if share == 0:
    return [cores] * count
  return [cores[i * share : (i + 1) * share] for i in range(count)]


def limits(count: int) -> dict[str, str]:
  """Variables that keep thread pools, XLA's and numpy's, to a share of cores.

  Args:
    count: Processes; each has a thread at least.
  """
  threads = max(1, len(_usable()) // count)
  return dict.fromkeys(("NPROC", "OMP_NUM_THREADS"), str(threads))


def pin(process_id: int, own: list[int]) -> None:
  """Keeps a process to its cores, where the system can.

  Args:
    process_id: Of a process that has just started, as threads it already has
      stay where they are.
    own: Its cores.
  """
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(process_id, own)


def _usable() -> list[int]:
  """Those that this process may use, which are not always all there are."""
  if hasattr(os, "sched_getaffinity"):
    return sorted(os.sched_getaffinity(0))
  return list(range(os.cpu_count() or 1))
