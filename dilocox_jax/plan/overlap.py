"""Divides the inner steps of an exchange among the messages of the exchange.

The inner steps of an exchange are those that run while it is under way. A
message may need the results of earlier messages of the exchange. The number of
earlier messages for which it has to wait is its *turn*. So messages of the same
turn can be sent at the same time. Each turn gets a part of the inner steps, its
*stretch*. A turn that sends more bytes gets more steps.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from dilocox_jax.plan.operations import Operation

# The end of a stretch is a fraction of all inner steps; this is its
# denominator. So a program can compute with whole numbers.
PARTS = 1024


def stretch_ends(
  operations: Sequence[Operation], num_replicas: int
) -> tuple[int, ...]:
  """Divides the inner steps of an exchange among its turns, by bytes.

  The messages of a turn can be sent at the same time. The messages of the next
  turn need their results. If nothing is sent, all turns get equally many steps.

  Args:
    operations: Operations of one exchange, in order, each with its turn.
    num_replicas: Number of replicas, M.

  Returns:
    Where the steps of each turn end, in 1024ths of all steps. For example,
    turns of 3 MB and 1 MB give (768, 1024): the first turn has three quarters
    of the steps.
  """
  num_turns = 1 + max((operation.turn for operation in operations), default=0)
  sent_bytes = [0] * num_turns
  for operation in operations:
    sent_bytes[operation.turn] += operation.sent_bytes(num_replicas)
  ends = list(itertools.accumulate(sent_bytes))
  if ends[-1] == 0:  # Nothing is sent.
    ends = list(range(1, num_turns + 1))
  return tuple(PARTS * end // ends[-1] for end in ends)


def stretches(num_steps: Any, ends: Sequence[int]) -> Iterator[Any]:
  """Yields how many inner steps run during each turn of an exchange.

  The messages of a turn can be sent at the same time.

  Args:
    num_steps: Number of inner steps during the whole exchange: an int, or a
      traced integer. The results are of the same kind.
    ends: Where the steps of each turn end, in 1024ths of all steps
      (`stretch_ends`). With (768, 1024), 8 steps are divided into 6 and 2.
  """
  start = 0
  for end in ends:
    stop = (num_steps * end + PARTS // 2) // PARTS  # Rounds to a whole step.
    yield stop - start
    start = stop
