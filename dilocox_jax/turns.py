"""Computations that pause wherever a message leaves or arrives.

An exchange over a slow link takes as long as many inner steps. So its code is
written as a generator, which yields where the caller may do something else.
Generators run while a program is traced; nothing of them is left in it.
"""

from collections.abc import Callable, Generator
from typing import Any

from dilocox_jax.trees import Tree

# A computation that yields a tree and goes on with the one that it is sent,
# which has the same values.
Pausing = Generator[Tree, Tree, Any]


def without_pauses(pausing: Callable[..., Pausing]) -> Callable[..., Any]:
  """Returns a function that runs a generator to its end and returns its value.

  The function has the generator's function as its attribute `pausing`.

  Args:
    pausing: Function that returns the generator.
  """

  def run(*args, **options):
    generator = pausing(*args, **options)
    try:
      tree = next(generator)
      while True:
        tree = generator.send(tree)
    except StopIteration as stop:
      return stop.value

  run.pausing = pausing  # pyright: ignore[reportFunctionMemberAccess]
  return run
