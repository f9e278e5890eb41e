"""Coroutines: computations that stop where a message is sent and received.

An exchange over a slow link takes as long as many inner steps. So the code of
an exchange is a generator, used as a coroutine. It yields the arrays of a
message before the message leaves, and yields the received arrays before it uses
them. At both places the caller may run inner steps
(`rounds.window.exchange_behind_steps`), and then resumes the generator with the
yielded arrays. The generator runs while JAX traces a program, so the compiled
program contains only the computations, not the stops.
"""

from collections.abc import Callable, Generator
from typing import Any

from dilocox_jax.trees import Tree

# Yields a tree, is resumed with a tree of the same values, and returns its
# result at the end. Exception: `aggregators.mailbox_mean` yields a message and
# is resumed with the reply of the mailbox.
Coroutine = Generator[Tree, Tree, Any]


def as_function(coroutine: Callable[..., Coroutine]) -> Callable[..., Any]:
  """Returns a function that runs a coroutine to its end, without a stop.

  Each value that the coroutine yields is sent back to it at once.

  Args:
    coroutine: Generator function of the coroutine.

  Returns:
    Function with the arguments of the generator function, which returns what
    the generator returns. Its attribute `coroutine` is the generator function,
    so that `Aggregator.average_coroutine` can run it with stops.
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
