"""Codecs by name, as configs write them: "low_rank(rank=16)+int(bits=4)".

Each link of a chain encodes what the link before it has left. Projections come
first, since only they may be undone after the mean. A quantizer comes last, as
codes can be decoded but not reduced further. So low_rank+int, top_k+int and
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

# Names that other libraries have for what is written otherwise here.
_USUAL_NAMES = {
  "fp32": "float32",
  "fp16": "float16",
  "half": "float16",
  "bf16": "bfloat16",
  "none": "float32",
}


def register_codec(name: str, codec: Lazy) -> None:
  """Makes a codec known under a name, which configs may use in chains.

  Args:
    name: The name, e.g. "int".
    codec: Its class, a frozen dataclass whose fields all have defaults, or the
      place of the class as "module:name".

  Raises:
    ValueError: If the name is taken, or the class is no codec.
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
    text: Names in `CODECS`, in the order in which they are applied. Settings
      of a link may follow its name, e.g. "low_rank(rank=4)+int(bits=2)".

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

  "low_rank(rank=4)+int" is ("low_rank", {"rank": 4}) and ("int", {}).

  Raises:
    ValueError: If the text is not written like that.
  """
  try:
    return parts_of(text)
  except ValueError as error:
    raise ValueError(
      f"codec={text!r} must be written like 'low_rank(rank=4)+int(bits=2)'"
    ) from error


def link_names(text: str) -> str:
  """Returns the names of a chain alone, e.g. "low_rank+int"."""
  return "+".join(name for name, _ in split_links(text))


def _link(name: str, settings: Mapping[str, Any], then: "Codec | None"):
  """Builds a link and what follows it."""
  if name not in CODECS:
    choices = ", ".join(CODECS)
    raise ValueError(
      f"codec={name!r} must be one of {choices}, or several joined by '+'"
      f"{_hint(name)}"
    )
  build = loaded(CODECS[name])
  fields = list(inspect.signature(build).parameters)
  has = ", ".join(field for field in fields if field != "then") or "none"
  own = [field for field in fields if field != "then"]
  for field in settings:
    said = f"{name} has no setting {field} (it has: {has})"
    near = did_you_mean(field, own)
    if near.startswith("did"):
      said += f": {near}"
    require(field in own, said)
  given = {} if then is None else {"then": then}
  require({*given} <= {*fields}, f"{name} must be the last link of a codec")
  with in_front(f"codec {name}: "):
    return build(**settings, **given)


def _hint(name: str) -> str:
  """Returns the end of a message: what an unknown name is likely to mean."""
  bits = re.fullmatch(r"u?int_?(\d+)", name)
  if bits:
    return f": did you mean 'int(bits={bits[1]})'?"
  if name.lower() in _USUAL_NAMES:
    return f": did you mean {_USUAL_NAMES[name.lower()]!r}?"
  near = did_you_mean(name, CODECS)
  return f": {near}" if near.startswith("did") else ""


for _name, _place in {
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
  register_codec(_name, _place)
