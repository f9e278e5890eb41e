"""Lets a config declare facts about a field, e.g. when a run reads it.

With this fact, a run can refuse a field that is set but not read: a user who
sets `data.glob` and forgets `data.source` gets an error, not a training on
another text.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from dilocox_jax.checks import Default

_FACTS = "facts"  # Key in the metadata of a dataclass field.


@dataclasses.dataclass(frozen=True)
class ReadIf:
  """The condition under which a run reads a field.

  Example: a run reads `mailbox.quorum` only if `exchange.collective` is
  "mailbox". Here `field` is "exchange.collective", and `holds` compares with
  "mailbox".

  Attributes:
    field: Dotted name of the field that decides, or `config.sections.DEVICES`,
      which stands for the number of devices of a replica.
    holds: Function from the value of `field` to whether the condition holds.
  """

  field: str
  holds: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Facts:
  """Facts about a field of the config.

  Attributes:
    read_if: Condition under which a run reads the field; None: always read.
    is_free_on_resume: Whether the field may change when a run is resumed.
    may_differ: Whether the field may differ between replicas that are separate
      programs and exchange through a mailbox (a store of files).
    is_left_to_device: Whether the default, None or "auto", lets the program
      choose a value that suits the devices.
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
  """Declares a field of a section of a config, with facts and limits.

  Args:
    default: Default value of the field.
    read_if: Condition under which a run reads the field; None: always read.
    is_free_on_resume: Whether the field may change when a run is resumed. Then
      the field may also differ between separate programs.
    may_differ: Whether the field may differ between replicas that are separate
      programs.
    is_left_to_device: Whether the default, None or "auto", lets the program
      choose a value that suits the devices.
    **limits: Limits of the value, e.g. `at_least=1` (`checks.within_limits`).

  Returns:
    The field of the dataclass; for type checkers a value of the default's type.
  """
  facts = Facts(
    read_if=read_if,
    is_free_on_resume=is_free_on_resume,
    may_differ=may_differ or is_free_on_resume,
    is_left_to_device=is_left_to_device,
  )
  return dataclasses.field(default=default, metadata={**limits, _FACTS: facts})


def facts_of(field: dataclasses.Field) -> Facts:
  """Returns the facts about a field of a config.

  If the field was declared without `setting`, each fact has its default.

  Args:
    field: Field of a dataclass.
  """
  return field.metadata.get(_FACTS, Facts())
