"""How the inner steps behind an exchange are divided among its messages.

A message that needs the result of the message before cannot travel with it. So
the inner steps that hide an exchange are run in as many stretches as it has
turns. A turn that sends more bytes gets more of the steps.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from dilocox_jax.plan.operations import Operation

# Parts into which the inner steps behind an exchange are divided, at most.
PARTS = 1024


def stretch_ends(
  operations: Sequence[Operation], num_replicas: int
) -> tuple[int, ...]:
  """Divides the inner steps behind an exchange among its turns, by bytes.

  Args:
    operations: Operations of one exchange, in order.
    num_replicas: Number of replicas, M.

  Returns:
    Where the stretch of each turn ends, in `PARTS` of all steps. Turns of
    3 MB and 1 MB give (768, 1024).
  """
  num_turns = 1 + max((each.turn for each in operations), default=0)
  sent_bytes = [0] * num_turns
  for operation in operations:
    sent_bytes[operation.turn] += operation.sent_bytes(num_replicas)
  ends = list(itertools.accumulate(sent_bytes))
  if not ends[-1]:
    ends = list(range(1, num_turns + 1))
  return tuple(PARTS * end // ends[-1] for end in ends)


def stretches(num_steps: Any, ends: Sequence[int]) -> Iterator[Any]:
  """Yields the number of inner steps of every turn of an exchange.

  Args:
    num_steps: Number of inner steps behind the exchange. It may be traced.
    ends: Result of `stretch_ends`.
  """
  start = 0
  for end in ends:
    stop = (num_steps * end + PARTS // 2) // PARTS  # The nearest step.
    yield stop - start
    start = stop
