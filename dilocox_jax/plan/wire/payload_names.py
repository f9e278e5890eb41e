"""Payloads by name, as configs write them: "low_rank+int".

A link's settings are written behind it, "low_rank(rank=4)+int(bits=2)", so an
extension has its own. Those of the package's links are also fields of the
config. A setting that no link of the chain has is refused.
"""

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from dilocox_jax.checks import in_front, of_type, one_of, require
from dilocox_jax.plan.choices import Lazy, Registry, check_lazy
from dilocox_jax.plan.wire.chain import Chain
from dilocox_jax.plan.wire.payload import (
  E3M0,
  FLOATS,
  ROLES,
  Dense,
  Int,
  Payload,
)
from dilocox_jax.plan.wire.reduction import LowRank, RandomMask, TopK


@dataclasses.dataclass(frozen=True)
class PayloadKind:
  """A payload that configs can name, and the codec that sends it.

  Attributes:
    payload: Class of the payload; all its fields have defaults.
    codec: Function, or its place, that builds the codec. It is called with the
      payload, the leaf, and what was built for each leaf in `carried`. For a
      projection these are `Codec`s, and it returns a `Codec`; it also gets
      `max_rank`, the largest rank to which a run may adapt low-rank links (0:
      none). For the other roles they are `Encoder`s, and it returns one.
    renamed: Names of settings by field, where they differ from the field's.
    fixed: Values of fields that the name stands for, which are no settings.
  """

  payload: type[Payload]
  codec: Lazy
  renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def settings(self) -> dict[str, str]:
    """The fields that configs may set, by the names of their settings."""
    fields = inspect.signature(self.payload).parameters
    return {self.renamed.get(f, f): f for f in fields if f not in self.fixed}


PAYLOADS: Registry[PayloadKind] = Registry("codec")


def register_codec(name: str, kind: PayloadKind) -> None:
  """Makes a codec known under a name, which configs may use in chains.

  Args:
    name: The name, e.g. "int".
    kind: The payload and how its codec is built.

  Raises:
    ValueError: If the name is taken or a role of the codec is missing.
  """
  with in_front(f"codec {name!r}: "):
    check_lazy("codec", kind.codec)
    example, base = kind.payload(**kind.fixed), Payload
    one_of("role", example.role, ROLES)
    says = ROLES[example.role]
    require(
      getattr(kind.payload, says) is not getattr(base, says),
      f"{kind.payload.__name__} has no {says}, which a {example.role} needs",
    )
  PAYLOADS.add(name, kind)


def codec_of(payload: Payload) -> Lazy:
  """Returns what builds the codec of a payload.

  Raises:
    ValueError: If no codec is registered for the payload's class.
  """
  kinds = {kind.payload: kind.codec for kind in PAYLOADS.values()}
  name = type(payload).__name__
  require(
    type(payload) in kinds,
    f"no codec is registered for {name}: call register_codec",
  )
  return kinds[type(payload)]


def named_payload(name: str, **settings: int | float | str | None) -> Payload:
  """Builds a payload from names joined by "+".

  Args:
    name: Names in `PAYLOADS`, in the order in which they are applied. Settings
      of a link may follow its name, e.g. "low_rank(rank=4)+int(bits=2)".
    **settings: Settings of the package's links; `fraction` and `block_size` of
      top_k and random_mask have longer names here. None leaves the default.

  Raises:
    ValueError: If a name is unknown, a setting belongs to no link or is given
      twice, or the links cannot form a chain.
  """
  given = {k: v for k, v in settings.items() if v is not None}
  links = split_links(name)
  kinds = [PAYLOADS[link] for link, _ in links if link in PAYLOADS]
  known = {setting for kind in kinds for setting in kind.settings}
  for key, value in given.items():
    if key not in known:
      has = ", ".join(sorted(known)) or "none"
      raise ValueError(
        f"{key}={value} is not a setting of {name!r} (it has: {has}): drop it"
      )
  built = [_link(link_name, given, own) for link_name, own in links]
  return built[0] if len(built) == 1 else Chain(tuple(built))


def split_links(name: str) -> list[tuple[str, dict[str, Any]]]:
  """Splits the name of a chain into links and the settings written behind them.

  "low_rank(rank=4)+int" is ("low_rank", {"rank": 4}) and ("int", {}).

  Raises:
    ValueError: If the name is not written like that.
  """
  if "(" not in name:
    return [(link_name, {}) for link_name in name.split("+")]
  try:
    return list(_links_of(ast.parse(name, mode="eval").body))
  except (SyntaxError, TypeError, ValueError) as error:
    raise ValueError(
      f"name={name!r} must be written like 'low_rank(rank=4)+int(bits=2)'"
    ) from error


def _links_of(node: ast.expr) -> Iterator[tuple[str, dict[str, Any]]]:
  match node:
    case ast.BinOp(left, ast.Add(), right):
      yield from _links_of(left)
      yield from _links_of(right)
    case ast.Name(name):
      yield name, {}
    case ast.Call(ast.Name(name), [], settings):
      yield name, {s.arg or "": _value(s.value) for s in settings}
    case _:
      raise ValueError("neither a name nor a name with settings")


def _value(node: ast.expr) -> Any:
  """Returns a number or a text, which needs no quotes."""
  return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def _link(name: str, given: Mapping, own: dict[str, Any]) -> Payload:
  if name not in PAYLOADS:
    choices = ", ".join(PAYLOADS)
    raise ValueError(
      f"name={name!r} must be one of {choices}, or several joined by '+'"
    )
  kind = PAYLOADS[name]
  taken = {
    field: given[setting]
    for setting, field in kind.settings.items()
    if setting in given
  }
  fields = kind.settings.values()
  for field in own:
    has = ", ".join(fields) or "none"
    require(field in fields, f"{name} has no setting {field} (it has: {has})")
    require(field not in taken, f"{field} of {name} is set twice: drop one")
  try:
    return kind.payload(**kind.fixed, **_typed(kind.payload, taken | own))
  except ValueError as error:
    message = str(error)
    for setting, field in kind.settings.items():
      if field in taken:
        message = message.replace(f"{field}=", f"{setting}=")
    raise ValueError(message) from error


def _typed(payload: type[Payload], given: Mapping) -> dict[str, Any]:
  """Checks the types of settings that are numbers or texts."""
  hints = _types(payload) if given else {}
  return {
    field: of_type(field, value, hints[field]) if field in hints else value
    for field, value in given.items()
  }


def _types(payload: type[Payload]) -> dict[str, type]:
  """Types of the fields that are numbers or texts, by name."""
  try:
    hints = typing.get_type_hints(payload)
  except NameError:  # A user's type that is imported for type checkers alone.
    return {}
  plain = {int, float, bool, str}
  return {field: hint for field, hint in hints.items() if hint in plain}


for _dtype in FLOATS:
  register_codec(
    _dtype,
    PayloadKind(
      Dense, "dilocox_jax.codecs.quantize:dense", fixed={"dtype": _dtype}
    ),
  )
for _name, _kind in {
  "int": PayloadKind(Int, "dilocox_jax.codecs.quantize:integer"),
  "e3m0": PayloadKind(E3M0, "dilocox_jax.codecs.quantize:e3m0"),
  "low_rank": PayloadKind(LowRank, "dilocox_jax.codecs.low_rank:low_rank"),
  # Names of settings that two links would otherwise share.
  "top_k": PayloadKind(
    TopK,
    "dilocox_jax.codecs.sparse:top_k",
    {"fraction": "top_k_fraction", "block_size": "top_k_block_size"},
  ),
  "random_mask": PayloadKind(
    RandomMask,
    "dilocox_jax.codecs.sparse:random_mask",
    {"fraction": "mask_fraction"},
  ),
}.items():
  register_codec(_name, _kind)
