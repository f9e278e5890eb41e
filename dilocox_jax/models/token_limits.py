"""Finds out how many different tokens a user's model knows.

Two numbers limit the tokens: the width of the logits, and the rows of the
tables in which the model looks up tokens. Both are read from the jaxpr of the
model (JAX's list of its operations), so nothing is computed.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import Array

from dilocox_jax.checks import require

# Operations that move token ids and do not change their values.
_MOVES = frozenset(
  [
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "reshape",
    "slice",
    "squeeze",
    "stop_gradient",
    "transpose",
  ]
)


@dataclasses.dataclass(frozen=True)
class TokenLimits:
  """How many different tokens the logits and the tables of a model know.

  Attributes:
    num_logits: Number of logits of a token, V.
    table_rows: Rows of the smallest table in which tokens are looked up. None:
      no such lookup was found, e.g. because the model multiplies one-hot
      vectors.
  """

  num_logits: int
  table_rows: int | None


def token_limits(
  logits: Callable[[Any, Array], Array], params: Any, shape: tuple[int, int]
) -> TokenLimits:
  """Finds out how many different tokens a model knows.

  Args:
    logits: Function (parameters, tokens [B, L]) -> logits [B, L, V].
    params: Shapes of the parameters, a tree of `jax.ShapeDtypeStruct`.
    shape: Shape (B, L) of the tokens with which the function is traced.

  Raises:
    ValueError: If the function does not return an array [B, L, V].
  """
  tokens = jax.ShapeDtypeStruct(shape, "int32")
  traced, result = jax.make_jaxpr(logits, return_shape=True)(params, tokens)
  is_array = isinstance(result, jax.ShapeDtypeStruct)
  returned = list(result.shape) if is_array else type(result).__name__
  require(
    is_array and result.ndim == 3 and result.shape[:2] == shape,
    f"the model returns {returned} for tokens {list(shape)}: without loss= it "
    "must return logits [sequences, tokens, vocabulary]",
  )
  token_variable = traced.jaxpr.invars[-1]  # The last argument: the tokens.
  table_rows = _rows_of_tables(traced.jaxpr, {token_variable})
  return TokenLimits(
    num_logits=result.shape[-1], table_rows=min(table_rows, default=None)
  )


def _rows_of_tables(jaxpr: Jaxpr, ids: set[Any]) -> Iterator[int]:
  """Yields the number of rows of each table in which a jaxpr looks up tokens.

  `ids` are the variables that hold token ids. This function adds to `ids` the
  variables to which the jaxpr moves token ids.
  """
  for equation in jaxpr.eqns:
    # A literal is not a variable, and cannot be in a set.
    reads = [v for v in equation.invars if not isinstance(v, core.Literal)]
    if not ids.intersection(reads):
      continue
    inner = _program_inside(equation)
    if inner is not None:
      inner_ids = set()
      for outside, inside in zip(equation.invars, inner.invars, strict=True):
        if outside in reads and outside in ids:
          inner_ids.add(inside)
      yield from _rows_of_tables(inner, inner_ids)
      # Ids that the inner program returns are ids in the outer one, too.
      for outside, inside in zip(equation.outvars, inner.outvars, strict=True):
        if not isinstance(inside, core.Literal) and inside in inner_ids:
          ids.add(outside)
    elif equation.primitive.name == "gather":
      yield from _rows_of_lookup(equation, ids)
    elif _keeps_ids(equation, ids):
      ids.update(equation.outvars)


def _program_inside(equation: Any) -> Jaxpr | None:
  """Returns the jaxpr that an equation calls, such as the function of a `jit`.

  Returns None if there is none, or if it has another number of inputs than the
  equation, as in a `while` loop.
  """
  for value in equation.params.values():
    program = value.jaxpr if isinstance(value, ClosedJaxpr) else value
    if isinstance(program, Jaxpr):
      if len(program.invars) != len(equation.invars):
        return None
      return program
  return None


def _keeps_ids(equation: Any, ids: set[Any]) -> bool:
  """Returns whether an operation on token ids is known to give token ids."""
  # Libraries let negative indices count from the end, by `select(id < 0, id +
  # rows, id)`. So ids plus a number that is not negative count as ids.
  name = equation.primitive.name
  if name == "add":
    literals = [v for v in equation.invars if isinstance(v, core.Literal)]
    if not literals:
      return False
    return all(literal.val >= 0 for literal in literals)
  if name == "select_n":
    choices = equation.invars[1:]
    return all(not isinstance(v, core.Literal) and v in ids for v in choices)
  return name in _MOVES


def _rows_of_lookup(equation: Any, ids: set[Any]) -> Iterator[int]:
  """Yields the number of rows of the table that a "gather" indexes.

  Yields nothing if the indices are not token ids.
  """
  table, indices = equation.invars[:2]
  axes = equation.params["dimension_numbers"].start_index_map
  if len(axes) == 1 and indices in ids:
    yield table.aval.shape[axes[0]]
