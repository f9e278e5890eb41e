"""Divides the cores of this machine among processes that run side by side.

XLA starts one thread for each core. Two processes with two threads each on two
cores mostly wait for each other: training `tiny` twice at once is nearly twice
as fast if each process has one core (measured).
"""

import os


def divided(count: int) -> list[list[int]]:
  """Returns the cores of each process; all cores for each if there are too few.

  Args:
    count: Number of processes.
  """
  cores = _usable()
  share = len(cores) // count
  if share == 0:
    return [cores] * count
  return [cores[i * share : (i + 1) * share] for i in range(count)]


def limits(count: int) -> dict[str, str]:
  """Returns environment variables that limit threads to a share of the cores.

  Args:
    count: Number of processes; each has at least one thread.
  """
  threads = max(1, len(_usable()) // count)
  return dict.fromkeys(("NPROC", "OMP_NUM_THREADS"), str(threads))


def limits_beside_exchange(count: int, xla_flags: str = "") -> dict[str, str]:
  """Returns limits for processes that exchange while they compute.

  A process needs two of XLA's threads, because a program that waits for a link
  holds one. With one core a process the second must not share its matrix
  products, which would only wait for each other.

  Args:
    count: Number of processes.
    xla_flags: Value of XLA_FLAGS so far.
  """
  own = limits(count)
  if own["NPROC"] != "1":
    return own
  flags = f"{xla_flags} --xla_cpu_multi_thread_eigen=false".strip()
  return dict.fromkeys(own, "2") | {"XLA_FLAGS": flags}


def pin(process_id: int, own: list[int]) -> None:
  """Binds a process to its cores, if the system can.

  Args:
    process_id: Id of a process that has just started. Threads that it already
      has are not bound.
    own: Cores of the process.
  """
  if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(process_id, own)


def _usable() -> list[int]:
  """Returns the cores that this process may use, which may not be all."""
  if hasattr(os, "sched_getaffinity"):
    return sorted(os.sched_getaffinity(0))
  return list(range(os.cpu_count() or 1))
