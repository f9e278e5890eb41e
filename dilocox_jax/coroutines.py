"""Coroutines: computations that stop where a message is sent and received.

An exchange over a slow link takes as long as many inner steps. So the exchange
is written as a generator (example: `dilocox_jax.Aggregator`). It yields a
message before the message leaves, and yields the received arrays before it uses
them. At these places the caller may run inner steps before it resumes the
generator with the yielded arrays. The stops exist only while JAX traces a
program, not in the compiled program.
"""

from collections.abc import Callable, Generator
from typing import Any

from dilocox_jax.trees import Tree

# Yields a tree, is resumed with a tree of the same values, and returns its
# result at the end. Exception: `aggregators.mailbox_mean` yields a message and
# is resumed with the reply of the mailbox.
Coroutine = Generator[Tree, Tree, Any]


def as_function(coroutine: Callable[..., Coroutine]) -> Callable[..., Any]:
  """Returns a function that runs a generator function to its end.

  Each yielded value is sent back at once, and the function returns what the
  generator returns. The attribute `coroutine` of the function is the generator
  function, so that a caller can also run the coroutine with stops.

  Args:
    coroutine: The generator function.
  """

  def run(*args, **options):
    generator = coroutine(*args, **options)
    try:
      tree = next(generator)
      while True:
        tree = generator.send(tree)
    except StopIteration as stop:
      return stop.value

  run.coroutine = coroutine  # pyright: ignore[reportFunctionMemberAccess]
  return run
