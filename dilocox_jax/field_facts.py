"""What is true of a config's field, which stands beside the field.

A field that is set and then ignored misleads: someone who sets `data.glob` and
forgets `data.source` would train on another text without a warning. So a field
that only some runs read says which. Three more facts are asked for later: by a
run that is resumed, by replicas that are programs of their own, and by the
devices.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from dilocox_jax.checks import Default

_FACTS = "facts"  # Key in the metadata of a dataclass field.


@dataclasses.dataclass(frozen=True)
class ReadIf:
  """The condition under which a run reads a field.

  Attributes:
    field: Dotted name of the field that decides.
    holds: Function from the value of that field to whether it is so.
  """

  field: str
  holds: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Facts:
  """What is true of a field.

  Attributes:
    read_if: When a run reads the field; None: always.
    is_free_on_resume: Whether the field may change when a run is resumed. It
      changes no result, only what is recorded or which devices compute it.
    may_differ: Whether replicas that are programs of their own may have
      different values.
    is_left_to_device: Whether the default leaves the value to the devices
      (`config.platforms`).
  """

  read_if: ReadIf | None = None
  is_free_on_resume: bool = False
  may_differ: bool = False
  is_left_to_device: bool = False


def setting(
  default: Default,
  *,
  read_if: ReadIf | None = None,
  is_free_on_resume: bool = False,
  may_differ: bool = False,
  is_left_to_device: bool = False,
  **limits: Any,
) -> Default:
  """Declares a field of a section, its limits, and what is true of it.

  Args:
    default: Default value of the field.
    read_if: As in `Facts`, like the next three.
    is_free_on_resume: What is free on resume may differ between programs too.
    may_differ: Whether programs may have different values.
    is_left_to_device: Whether the default leaves the value to the devices.
    **limits: Limits as in `checks.within_limits`.
  """
  facts = Facts(
    read_if=read_if,
    is_free_on_resume=is_free_on_resume,
    may_differ=may_differ or is_free_on_resume,
    is_left_to_device=is_left_to_device,
  )
  return dataclasses.field(default=default, metadata={**limits, _FACTS: facts})


def facts_of(field: dataclasses.Field) -> Facts:
  """Returns what is true of a field, which may be declared without `setting`.

  Args:
    field: Field of a section.
  """
  return field.metadata.get(_FACTS, Facts())
