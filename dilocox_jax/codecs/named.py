"""Builds codecs from names, such as "low_rank(rank=16)+int(bits=4)".

Names joined by "+" are a chain: each codec encodes the values that the codec
before it sends. A projection (low_rank, random_mask) can only come first, and a
quantizer (such as int) only last. For example, low_rank+int and
random_mask+top_k+int are chains; int+top_k and top_k+low_rank are refused.
Without a quantizer at the end, values are sent in float32.

The class of a codec is imported when it is first used, because this import
loads JAX.
"""

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Mapping
from typing import Any

from dilocox_jax.checks import did_you_mean, in_front, require
from dilocox_jax.plan.choices import (
  Lazy,
  Registry,
  check_lazy,
  loaded,
  parts_of,
)

if typing.TYPE_CHECKING:
  from dilocox_jax.codecs.base import Codec

CODECS: Registry[Lazy] = Registry("codec")

# Usual names of codecs that have another name here, for error messages.
_USUAL_NAMES = {
  "fp32": "float32",
  "fp16": "float16",
  "half": "float16",
  "bf16": "bfloat16",
  "none": "float32",
}


def register_codec(name: str, codec: Lazy) -> None:
  """Registers a codec under a name, for configs such as "low_rank+NAME".

  Args:
    name: The name, e.g. "int".
    codec: The class of the codec, a frozen dataclass derived from `Codec` whose
      fields all have defaults; or where to import the class from, as
      "module:name".

  Raises:
    ValueError: If the name is taken, or if the class is not a codec.
  """
  check_lazy(f"codec {name!r}", codec)
  if isinstance(codec, type):
    from dilocox_jax.codecs.base import Codec

    require(
      issubclass(codec, Codec) and dataclasses.is_dataclass(codec),
      f"codec {name!r}: {codec.__name__} must be a dataclass derived from "
      "dilocox_jax.Quantizer, Encoder or Projection",
    )
  CODECS.add(name, codec)


@functools.cache
def named_codec(text: str) -> "Codec":
  """Builds a codec from names joined by "+".

  Args:
    text: Names in `CODECS`, in the order in which the codecs encode. Settings
      of a codec may follow its name, e.g. "low_rank(rank=4)+int(bits=2)".

  Raises:
    ValueError: One line, if the text is not written in this way, if a name or a
      setting is unknown, if a value is wrong, or if the codecs cannot follow
      each other.
  """
  codec = None
  for name, settings in reversed(split_links(text)):
    codec = _link(name, settings, codec)
  assert codec is not None
  return codec


def split_links(text: str) -> list[tuple[str, dict[str, Any]]]:
  """Returns name and settings of every codec in a chain (joined by "+").

  The names need not be known. Example: "low_rank(rank=4)+int" gives
  [("low_rank", {"rank": 4}), ("int", {})].

  Raises ValueError if the text is not written as a chain.
  """
  try:
    return parts_of(text)
  except ValueError as error:
    raise ValueError(
      f"codec={text!r} must be written like 'low_rank(rank=4)+int(bits=2)'"
    ) from error


def link_names(text: str) -> str:
  """Returns the names of a chain: "low_rank+int" for "low_rank(rank=4)+int".

  Raises ValueError if the text is not written as a chain.
  """
  return "+".join(name for name, _ in split_links(text))


def _link(
  name: str, settings: Mapping[str, Any], then: "Codec | None"
) -> "Codec":
  """Builds one codec of a chain, with the fields `settings` and `then`.

  `then` is the next codec of the chain, None for the last one. Raises
  ValueError if the name or a setting is wrong, or if no codec may follow.
  """
  if name not in CODECS:
    choices = ", ".join(CODECS)
    raise ValueError(
      f"codec={name!r} must be one of {choices}, or several joined by '+'"
      f"{_hint(name)}"
    )
  build = loaded(CODECS[name])
  fields = list(inspect.signature(build).parameters)
  known_settings = [field for field in fields if field != "then"]
  known_names = ", ".join(known_settings) or "none"
  for field in settings:
    message = f"{name} has no setting {field} (it has: {known_names})"
    # "did you mean ...", or "have: ...", which the message already says.
    suggestion = did_you_mean(field, known_settings)
    if suggestion.startswith("did"):
      message += f": {suggestion}"
    require(field in known_settings, message)
  arguments = dict(settings)
  if then is not None:
    require("then" in fields, f"{name} must be the last link of a codec")
    arguments["then"] = then
  with in_front(f"codec {name}: "):
    return build(**arguments)


def _hint(name: str) -> str:
  """Returns the end of the error for an unknown codec: ": did you mean 'int'?".

  It is "" if no known name is similar.
  """
  # Names such as "int4" and "uint_8".
  bits = re.fullmatch(r"u?int_?(\d+)", name)
  if bits:
    return f": did you mean 'int(bits={bits[1]})'?"
  if name.lower() in _USUAL_NAMES:
    return f": did you mean {_USUAL_NAMES[name.lower()]!r}?"
  # "did you mean ...", or "have: ...", which the error already says.
  suggestion = did_you_mean(name, CODECS)
  if suggestion.startswith("did"):
    return f": {suggestion}"
  return ""


for _name, _import_path in {
  "float32": "dilocox_jax.codecs.quantize:float32",
  "bfloat16": "dilocox_jax.codecs.quantize:bfloat16",
  "float16": "dilocox_jax.codecs.quantize:float16",
  "int": "dilocox_jax.codecs.quantize:Int",
  "e3m0": "dilocox_jax.codecs.quantize:E3M0",
  "low_rank": "dilocox_jax.codecs.low_rank:LowRank",
  "local_low_rank": "dilocox_jax.codecs.low_rank:LocalLowRank",
  "top_k": "dilocox_jax.codecs.sparse:TopK",
  "random_mask": "dilocox_jax.codecs.sparse:RandomMask",
}.items():
  register_codec(_name, _import_path)
