"""Payloads by name, as configs write them: "low_rank+int".

A setting that no link of the chain has is refused.
"""

import inspect
from collections.abc import Callable, Mapping

from dilocox_jax.plan.wire.chain import Chain
from dilocox_jax.plan.wire.payload import E3M0, FLOATS, Dense, Int, Payload
from dilocox_jax.plan.wire.reduction import LowRank, RandomMask, TopK

PAYLOADS: Mapping[str, Callable[..., Payload]] = {
  "int": Int,
  "e3m0": E3M0,
  "low_rank": LowRank,
  "top_k": TopK,
  "random_mask": RandomMask,
}
# Names of settings that two links would otherwise share.
_RENAMED = {
  "top_k": {"fraction": "top_k_fraction", "block_size": "top_k_block_size"},
  "random_mask": {"fraction": "mask_fraction"},
}


def named_payload(name: str, **settings: int | float | str | None) -> Payload:
  """Builds a payload from names joined by "+".

  Args:
    name: A float type ("float32", "bfloat16", "float16"), or `PAYLOADS` in the
      order in which they are applied.
    **settings: Values for the attributes of the links; `fraction` and
      `block_size` of top_k and random_mask have longer names here. None leaves
      the default.

  Raises:
    ValueError: If a name is unknown, a setting belongs to no link, or the links
      cannot form a chain.
  """
  given = {k: v for k, v in settings.items() if v is not None}
  names = name.split("+")
  links = [_link(link_name, given) for link_name in names]
  known = {setting for link_name in names for setting in _settings(link_name)}
  for key, value in given.items():
    if key not in known:
      has = ", ".join(sorted(known)) or "none"
      raise ValueError(
        f"{key}={value} is not a setting of {name!r} (it has: {has}): drop it"
      )
  return links[0] if len(links) == 1 else Chain(tuple(links))


def _link(name: str, given: Mapping) -> Payload:
  if name in FLOATS:
    return Dense(name)
  if name not in PAYLOADS:
    choices = ", ".join((*FLOATS, *PAYLOADS))
    raise ValueError(
      f"name={name!r} must be one of {choices}, or several joined by '+'"
    )
  settings = _settings(name)
  taken = {
    attribute: given[setting]
    for setting, attribute in settings.items()
    if setting in given
  }
  try:
    return PAYLOADS[name](**taken)
  except ValueError as error:
    message = str(error)
    for setting, attribute in settings.items():
      message = message.replace(f"{attribute}=", f"{setting}=")
    raise ValueError(message) from error


def _settings(name: str) -> dict[str, str]:
  """Returns the attributes of a link by the names of their settings."""
  if name not in PAYLOADS:
    return {}
  renamed = _RENAMED.get(name, {})
  attributes = inspect.signature(PAYLOADS[name]).parameters
  return {renamed.get(name, name): name for name in attributes}
