"""Names that a config chooses among.

They stand apart from the code that they choose, so that a config can be checked
and a command line answered without the seconds that loading JAX takes.
"""

import ast
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from dilocox_jax.checks import require

Part = TypeVar("Part")
# A function, or its place as "module:name", which is imported when it is used.
# The plan names functions that need JAX in this way and does not load it.
Lazy = Callable[..., Any] | str


class Registry(dict[str, Part]):
  """Parts of one kind by name, the package's own and those of extensions."""

  def __init__(self, kind: str):
    """Makes an empty registry of a kind, e.g. "codec"."""
    super().__init__()
    self._kind = kind

  def add(self, name: str, part: Part) -> None:
    """Adds a part.

    Args:
      name: Name by which a config chooses the part, e.g. "low_rank".
      part: The part.

    Raises:
      ValueError: If the name is taken, or cannot be part of a config value.
    """
    is_name = name.isidentifier()
    require(is_name, f"{self._kind} {name!r}: a name has letters, digits and _")
    require(name not in self, f"{self._kind} {name!r} is registered already")
    self[name] = part


def check_lazy(what: str, reference: Any) -> None:
  """Raises ValueError unless a value is a function or names its place.

  Args:
    what: The part and role that the value is for, for the message.
    reference: The value to check.
  """
  is_place = isinstance(reference, str) and reference.count(":") == 1
  if not is_place and not callable(reference):
    raise ValueError(
      f"{what}={reference!r} must be a function or its 'module:name'"
    )


def loaded(reference: Lazy) -> Callable[..., Any]:
  """Returns the function that a reference stands for.

  Raises:
    ValueError: If a place has no such module or function. The message is one
      line.
  """
  if not isinstance(reference, str):
    return reference
  try:
    return pkgutil.resolve_name(reference)
  except (ImportError, AttributeError) as error:
    raise ValueError(
      f"{reference!r}: {error}: correct it, or add its folder to PYTHONPATH"
    ) from error


def parts_of(text: str) -> list[tuple[str, dict[str, Any]]]:
  """Returns name and settings of each part that a text names, joined by "+".

  "low_rank(rank=4)+int" is ("low_rank", {"rank": 4}) and ("int", {}). A value
  is a number, or a text, which needs no quotes if it is a name.

  Args:
    text: Names, each with its settings behind it.

  Raises:
    ValueError: If the text is not written like that.
  """
  try:
    return list(_parts(ast.parse(text, mode="eval").body))
  except (SyntaxError, TypeError, ValueError) as error:
    raise ValueError(f"{text!r}: {error}") from error


def text_of_part(name: str, settings: Mapping[str, Any]) -> str:
  """Returns a text of which `parts_of` makes this name and these settings."""
  if not settings:
    return name
  given = ", ".join(f"{key}={_text(value)}" for key, value in settings.items())
  return f"{name}({given})"


def _text(value: Any) -> str:
  is_name = isinstance(value, str) and value.isidentifier()
  return value if is_name else repr(value)


def _parts(node: ast.expr) -> Iterator[tuple[str, dict[str, Any]]]:
  match node:
    case ast.BinOp(left, ast.Add(), right):
      yield from _parts(left)
      yield from _parts(right)
    case ast.Name(name):
      yield name, {}
    case ast.Call(ast.Name(name), [], given) if all(s.arg for s in given):
      yield name, {str(s.arg): _value(s.value) for s in given}
    case _:
      raise ValueError("neither a name nor a name with settings")


def _value(node: ast.expr) -> Any:
  """Returns a number or a text, which needs no quotes."""
  return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


LAYOUTS = ("stacked", "mesh")  # Replicas share a device, or have their own.
# "auto" stands for the best one on the devices (`config.platforms`).
COMPUTE_DTYPES = ("auto", "float32", "bfloat16")
ATTENTIONS = ("auto", "plain", "blockwise", "cudnn", "splash")
STACKED_BY = ("auto", "map", "vmap")  # How stacked replicas are run.
SCHEDULES = ("constant", "cosine", "wsd")  # Inner learning rates.
REFERENCES = ("own", "mean")  # What a residual is measured against.
REMATS = ("none", "dots", "full")  # What a backward computes again.
MEMORIES = ("device", "pinned_host")  # Where the outer state is kept.
# What dispatches a delayed exchange: the window's program, or a thread.
DISPATCHES = ("auto", "round", "thread")

SPLASH_LENGTH = 128  # That kernel's sequences are a multiple of it.


def check_splash_length(length: int) -> None:
  """Raises ValueError unless the kernel takes sequences of so many tokens."""
  require(
    length % SPLASH_LENGTH == 0,
    f"model.attention=splash needs sequences of a multiple of {SPLASH_LENGTH} "
    f"tokens, not {length}: change data.sequence_length, or take "
    "model.attention=blockwise",
  )


# Options of optimizers that a config can set.
ALL_OPTIONS = ("b1", "b2", "weight_decay", "momentum", "nesterov")
# Options that common optimizers take, of those that a config can set. They are
# checked without optax; of an optimizer that is not here, optax says the rest.
OPTIMIZER_OPTIONS = {
  "adam": ("b1", "b2", "nesterov"),
  "adamw": ("b1", "b2", "weight_decay", "nesterov"),
  "lion": ("b1", "b2", "weight_decay"),
  "muon": ALL_OPTIONS,
  "nadamw": ("b1", "b2", "weight_decay", "nesterov"),
  "rmsprop": ("momentum", "nesterov"),
  "sgd": ("momentum", "nesterov"),
}
