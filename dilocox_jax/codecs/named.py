"""Codecs by name, as configs write them: "low_rank(rank=16)+int(bits=4)".

Names joined by "+" are a chain, and each name is a link of it. Each link
encodes the values that the link before it sends. Projections come first, since
only they may be undone after the mean. A quantizer comes last, because its
codes can be decoded but not compressed further. So low_rank+int, top_k+int and
random_mask+top_k+int are chains; int+top_k and top_k+low_rank are refused.
Without a quantizer at the end, values are sent in float32.

A codec's class is loaded when it is first used, because that loads JAX.
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

# Names of other libraries for codecs that have another name here.
_USUAL_NAMES = {
  "fp32": "float32",
  "fp16": "float16",
  "half": "float16",
  "bf16": "bfloat16",
  "none": "float32",
}


def register_codec(name: str, codec: Lazy) -> None:
  """Registers a codec under a name, which configs may use in chains.

  Args:
    name: The name, e.g. "int".
    codec: The class of the codec, a frozen dataclass whose fields all have
      defaults; or where to import the class from, as "module:name".

  Raises:
    ValueError: If the name is taken, or the class is not a codec.
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
    text: Names in `CODECS`, in the order in which the links encode. Settings of
      a link may follow its name, e.g. "low_rank(rank=4)+int(bits=2)".

  Raises:
    ValueError: If a name or a setting is unknown, or the links cannot form a
      chain.
  """
  codec = None
  for name, settings in reversed(split_links(text)):
    codec = _link(name, settings, codec)
  assert codec is not None
  return codec


def split_links(text: str) -> list[tuple[str, dict[str, Any]]]:
  """Returns name and settings of every link, without loading a class.

  For example, "low_rank(rank=4)+int" gives ("low_rank", {"rank": 4}) and
  ("int", {}). Whether the names are known is not checked.

  Args:
    text: As for `named_codec`.

  Raises:
    ValueError: If the text is not a chain of names and settings.
  """
  try:
    return parts_of(text)
  except ValueError as error:
    raise ValueError(
      f"codec={text!r} must be written like 'low_rank(rank=4)+int(bits=2)'"
    ) from error


def link_names(text: str) -> str:
  """Returns a chain without its settings.

  Args:
    text: As for `named_codec`. For example, "low_rank(rank=4)+int" gives
      "low_rank+int".
  """
  return "+".join(name for name, _ in split_links(text))


def _link(
  name: str, settings: Mapping[str, Any], then: "Codec | None"
) -> "Codec":
  """Builds one link of a chain.

  Args:
    name: Name of the link.
    settings: Values of the fields of its class, by name.
    then: The link that follows; None: the link is the last one.

  Raises:
    ValueError: If the name, a setting or its value is wrong, or if another link
      follows a quantizer.
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
  """Returns the end of the error message about an unknown name.

  The end suggests the codec whose name is most similar. It is empty if no name
  is similar.

  Args:
    name: The unknown name, e.g. "int8".
  """
  bits = re.fullmatch(r"u?int_?(\d+)", name)
  if bits:
    return f": did you mean 'int(bits={bits[1]})'?"
  if name.lower() in _USUAL_NAMES:
    return f": did you mean {_USUAL_NAMES[name.lower()]!r}?"
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
