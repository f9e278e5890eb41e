"""Names that a config can choose, and the texts that combine them.

The module has lists of names, the class of registries (parts by name), and the
parser of texts such as "low_rank(rank=4)+int". It needs no JAX, so a config is
checked quickly.
"""

import ast
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from dilocox_jax.checks import require

Part = TypeVar("Part")
# A function, or where to import it from as "module:name". It is imported when
# it is used. In this way the plan names functions that need JAX without loading
# JAX.
Lazy = Callable[..., Any] | str


class Registry(dict[str, Part]):
  """Parts of one kind, e.g. codecs or methods, by the name in a config."""

  def __init__(self, kind: str):
    """Makes an empty registry. `kind`, e.g. "codec", is for messages."""
    super().__init__()
    self._kind = kind

  def add(self, name: str, part: Part) -> None:
    """Registers a part under the name by which a config chooses the part.

    Raises:
      ValueError: If the name is taken or is no Python identifier.
    """
    require(
      isinstance(name, str) and name.isidentifier(),
      f"{self._kind} {name!r}: a name has letters, digits and _",
    )
    require(name not in self, f"{self._kind} {name!r} is registered already")
    self[name] = part


def check_lazy(what: str, reference: Any) -> None:
  """Raises ValueError unless a value is callable or a text with one ":".

  The text is not imported. `what` is the name of the value in the message, e.g.
  "rule 'mix': build".
  """
  is_import_path = isinstance(reference, str) and reference.count(":") == 1
  if not is_import_path and not callable(reference):
    raise ValueError(
      f"{what}={reference!r} must be a function or its 'module:name'"
    )


def loaded(reference: Lazy) -> Callable[..., Any]:
  """Returns a function as it is, or imports it from a text "module:name".

  Raises:
    ValueError: If there is no such module or name.
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
  """Parses a text such as "low_rank(rank=4)+int".

  Args:
    text: Names of parts (codecs, for example) joined by "+". Settings in
      parentheses may follow a name. The value of a setting is a Python literal.
      A string that is an identifier needs no quotes.

  Returns:
    Name and settings of each part, in order. The example gives [("low_rank",
    {"rank": 4}), ("int", {})].

  Raises:
    ValueError: If the text cannot be parsed, e.g. "low_rank(".
  """
  try:
    return list(_parts(ast.parse(text, mode="eval").body))
  except (SyntaxError, TypeError, ValueError) as error:
    raise ValueError(f"{text!r}: {error}") from error


def text_of_part(name: str, settings: Mapping[str, Any]) -> str:
  """Returns the text from which `parts_of` reads a name and settings.

  For example, "low_rank" and {"rank": 4} give "low_rank(rank=4)". Without
  settings the text is the name alone.
  """
  if not settings:
    return name
  texts = [f"{key}={_text(value)}" for key, value in settings.items()]
  return f"{name}({', '.join(texts)})"


def _text(value: Any) -> str:
  """Returns the `repr` of a value; a text that is an identifier stays as is."""
  if isinstance(value, str) and value.isidentifier():
    return value
  return repr(value)


def _parts(node: ast.expr) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields name and settings of each part of a text such as "a(x=1)+b".

  Raises ValueError if a part is neither a name nor a name with settings.
  """
  match node:
    case ast.BinOp(left, ast.Add(), right):
      yield from _parts(left)
      yield from _parts(right)
    case ast.Name(name):
      yield name, {}
    # The argument `**settings` would be a keyword without a name.
    case ast.Call(ast.Name(name), [], keywords) if all(
      keyword.arg for keyword in keywords
    ):
      yield (
        name,
        {str(keyword.arg): _value(keyword.value) for keyword in keywords},
      )
    case _:
      raise ValueError("neither a name nor a name with settings")


def _value(node: ast.expr) -> Any:
  """Returns the value of a literal, or the name of an identifier.

  Raises ValueError if the expression is neither.
  """
  if isinstance(node, ast.Name):
    return node.id
  return ast.literal_eval(node)


LAYOUTS = ("stacked", "mesh")  # Replicas share one device, or have their own.
# "auto" is the best choice for the devices (`config.platforms`).
COMPUTE_DTYPES = ("auto", "float32", "bfloat16")
ATTENTIONS = ("auto", "plain", "blockwise", "cudnn", "splash")
STACKED_BY = ("auto", "map", "vmap")  # How stacked replicas are run.
SCHEDULES = ("constant", "cosine", "wsd")  # Inner learning rates.
OUTER_SCHEDULES = ("constant", "cosine")  # Outer learning rates.
# The residual of error feedback is the replica's values minus what its own
# message, or the mean of all replicas, has of them.
REFERENCES = ("own", "mean")
# What a backward pass recomputes. "none": nothing; "dots": all but the matrix
# products; "full": everything.
REMATS = ("none", "dots", "full")
# Data shards of a pipeline collect all layers of their stage once a step, or
# one layer at a time for each micro-batch. "auto" is "stage" if all layers of
# the stage fit into a device.
GATHERS = ("auto", "stage", "layer")
MEMORIES = ("device", "pinned_host")  # Where the outer state is kept.
# A delayed exchange is a part of the program that takes the inner steps
# ("round"), or runs in a thread of its own ("thread").
DISPATCHES = ("auto", "round", "thread")

# The attention kernel "splash" takes sequences whose length is a multiple of
# this.
SPLASH_LENGTH = 128


def check_splash_length(length: int) -> None:
  """Raises ValueError unless a sequence has a multiple of 128 tokens.

  The attention kernel "splash" takes no other length.
  """
  require(
    length % SPLASH_LENGTH == 0,
    f"model.attention=splash needs sequences of a multiple of {SPLASH_LENGTH} "
    f"tokens, not {length}: change data.sequence_length, or take "
    "model.attention=blockwise",
  )


# Optimizer options that a config can set.
ALL_OPTIONS = ("b1", "b2", "weight_decay", "momentum", "nesterov")
# The options of `ALL_OPTIONS` that common optimizers take. They are checked
# without optax. For all other optimizers, optax itself checks the options.
OPTIMIZER_OPTIONS = {
  "adam": ("b1", "b2", "nesterov"),
  "adamw": ("b1", "b2", "weight_decay", "nesterov"),
  "lion": ("b1", "b2", "weight_decay"),
  "muon": ALL_OPTIONS,
  "nadamw": ("b1", "b2", "weight_decay", "nesterov"),
  "rmsprop": ("momentum", "nesterov"),
  "schedule_free_sgd": ("b1", "weight_decay"),
  "sgd": ("momentum", "nesterov"),
}
