"""One replica of `tests.meeting.apart` as a process.

python -m tests.meeting.rounds_process FOLDER METHOD NUMBER REPLICAS RESULT
"""

import sys

import jax
import numpy as np

from tests.meeting import apart

if __name__ == "__main__":
  folder, method, number, replicas, result = sys.argv[1:]
  losses, outer = apart.alone(
    folder,
    method,
    int(number),
    int(replicas),
    rules=apart.rules(int(replicas)),
  )
  np.savez(result, losses, *jax.tree.leaves(outer))
