"""Payloads by name, as configurations write them: "low_rank+int".

A setting that no part of the chain has is refused, not ignored.
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
# Names of settings that two parts would otherwise share.
_RENAMED = {
  "top_k": {"fraction": "top_k_fraction", "block_size": "top_k_block_size"},
  "random_mask": {"fraction": "mask_fraction"},
}


def named_payload(name: str, **settings: int | float | str | None) -> Payload:
  """Builds a payload from names joined by "+".

  Args:
    name: A float type ("float32", "bfloat16", "float16"), or `PAYLOADS` in the
      order in which they are applied.
    **settings: Values for the parts' attributes, `fraction` and `block_size`
      of top_k and random_mask under longer names; None leaves a default.

  Raises:
    ValueError: If a name is unknown, a setting belongs to no part, or the
      parts make no chain.
  """
  given = {k: v for k, v in settings.items() if v is not None}
  parts = [_part(each, given) for each in name.split("+")]
  known = {setting for each in name.split("+") for setting in _settings(each)}
  for key, value in given.items():
    if key not in known:
      has = ", ".join(sorted(known)) or "none"
      raise ValueError(
        f"{key}={value} is not a setting of {name!r} (it has: {has}): drop it"
      )
  return parts[0] if len(parts) == 1 else Chain(tuple(parts))


def _part(name: str, given: Mapping) -> Payload:
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
  """Setting to attribute, of one part."""
  if name not in PAYLOADS:
    return {}
  renamed = _RENAMED.get(name, {})
  attributes = inspect.signature(PAYLOADS[name]).parameters
  return {renamed.get(each, each): each for each in attributes}
