"""Refuses collectives between replicas that are separate programs.

Replicas that exchange through a store (a folder or a bucket) are separate
programs without a common JAX runtime. So a collective over the axis "replica"
cannot reach the other replicas. If the axis had only this replica, the
collective would return its own argument, and the replica would silently train
alone. So the axis of such a replica has another name, `ALONE_AXIS`. For a
collective over "replica", JAX then raises a NameError. The functions of this
module turn it into a ValueError that says what to change.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from dilocox_jax.distributed.replicas import (
  ALONE_AXIS,
  REPLICA_AXIS,
  Replicas,
)

# Names of the traced code, for error messages.
INNER_STEP = "the inner step (model, loss or inner optimizer)"
OUTER_STEP = "the outer step (exchange, apply rule or outer optimizer)"


@contextlib.contextmanager
def refuse_collectives(what: str, replicas: Replicas) -> Iterator[None]:
  """Turns JAX's error about a missing replica axis into one clear line.

  It is a context manager for code that traces an inner or outer step.

  Args:
    what: Name of the code that is traced, for the message.
    replicas: The replicas of this process.

  Raises:
    ValueError: If the code uses the replica axis although the other replicas
      are other programs that meet in a store (a folder or a bucket).
  """
  try:
    yield
  except NameError as error:
    # Only the text of JAX's NameError says that it is about an axis.
    is_about_axis = "axis name" in str(error) and REPLICA_AXIS in str(error)
    if replicas.axis_name != ALONE_AXIS or not is_about_axis:
      raise
    raise ValueError(
      f"{what} uses the axis {REPLICA_AXIS!r}, e.g. in a pmean or axis_index, "
      "but replicas that meet in a store are programs of their own and share "
      "no axis: leave it out, or train all replicas in one runtime"
    ) from error


def refusing_collectives(
  what: str, function: Callable[..., Any], replicas: Replicas
) -> Callable[..., Any]:
  """Wraps a function so that it runs inside `refuse_collectives`.

  `what` names the function in the message of the error.
  """

  def guarded(*arguments: Any, **named: Any) -> Any:
    with refuse_collectives(what, replicas):
      return function(*arguments, **named)

  return guarded
