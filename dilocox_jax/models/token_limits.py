"""How many different tokens a model knows that somebody hands in.

Two things say it: the width of the logits, and the rows of every table in which
the model looks tokens up. Both are read in the program that JAX traces, so
nothing is computed.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import Array

from dilocox_jax.checks import require

# Operations that move token ids and leave their values as they are.
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
  """How many tokens the parts of a model know.

  Attributes:
    logits: Number of logits of a token, V.
    table: Rows of the smallest table in which tokens are looked up. None: no
      such lookup was found, as in a model that multiplies one-hot vectors or
      changes ids before it looks them up.
  """

  logits: int
  table: int | None


def token_limits(
  logits: Callable[[Any, Array], Array], params: Any, shape: tuple[int, int]
) -> TokenLimits:
  """Reads how many tokens a model knows.

  Args:
    logits: Function (parameters, tokens [B, L]) -> logits [B, L, V].
    params: Shapes of the parameters.
    shape: (B, L).

  Raises:
    ValueError: If the function returns something else than logits.
  """
  tokens = jax.ShapeDtypeStruct(shape, "int32")
  traced, found = jax.make_jaxpr(logits, return_shape=True)(params, tokens)
  is_array = isinstance(found, jax.ShapeDtypeStruct)
  returned = list(found.shape) if is_array else type(found).__name__
  require(
    is_array and found.ndim == 3 and found.shape[:2] == shape,
    f"the model returns {returned} for tokens {list(shape)}: without loss= it "
    "must return logits [sequences, tokens, vocabulary]",
  )
  ids = traced.jaxpr.invars[-1]
  table = min(_looked_up(traced.jaxpr, {ids}), default=None)
  return TokenLimits(found.shape[-1], table)


def _looked_up(jaxpr: Jaxpr, ids: set[Any]) -> Iterator[int]:
  """Yields the rows of each table that token ids are the indices of.

  Args:
    jaxpr: Program, or a part of one.
    ids: Variables that hold token ids; those that are found are added.
  """
  for equation in jaxpr.eqns:
    # A literal is no variable, and cannot be in a set.
    reads = [v for v in equation.invars if not isinstance(v, core.Literal)]
    if not ids.intersection(reads):
      continue
    inner = _program_inside(equation)
    if inner is not None:
      inner_ids = {
        inside
        for outside, inside in zip(equation.invars, inner.invars, strict=True)
        if outside in reads and outside in ids
      }
      yield from _looked_up(inner, inner_ids)
      ids.update(
        outside
        for outside, inside in zip(equation.outvars, inner.outvars, strict=True)
        if not isinstance(inside, core.Literal) and inside in inner_ids
      )
    elif equation.primitive.name == "gather":
      yield from _rows_of(equation, ids)
    elif _keeps_ids(equation, ids):
      ids.update(equation.outvars)


def _program_inside(equation: Any) -> Jaxpr | None:
  """Returns the program of a call, e.g. of `jit` or `checkpoint`."""
  for value in equation.params.values():
    program = value.jaxpr if isinstance(value, ClosedJaxpr) else value
    if isinstance(program, Jaxpr):
      is_call = len(program.invars) == len(equation.invars)
      return program if is_call else None
  return None


def _keeps_ids(equation: Any, ids: set[Any]) -> bool:
  """Whether the result of an operation is token ids again.

  Libraries let negative indices count from the end, by
  `select(id < 0, id + rows, id)`. So a sum of ids and a positive number still
  counts, and a choice only if all that it chooses among are ids.
  """
  name = equation.primitive.name
  if name == "add":
    literals = [v for v in equation.invars if isinstance(v, core.Literal)]
    return all(literal.val >= 0 for literal in literals) and bool(literals)
  if name == "select_n":
    choices = equation.invars[1:]
    return all(not isinstance(v, core.Literal) and v in ids for v in choices)
  return name in _MOVES


def _rows_of(equation: Any, ids: set[Any]) -> Iterator[int]:
  """Yields the rows of the table of a lookup whose only indices are ids."""
  table, indices = equation.invars[:2]
  axes = equation.params["dimension_numbers"].start_index_map
  if len(axes) == 1 and indices in ids:
    yield table.aval.shape[axes[0]]
