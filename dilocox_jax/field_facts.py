"""Facts about the fields of a config, declared beside each field.

A field that only some runs read declares the condition under which it is read.
So a field that is set but not read can be refused: otherwise a user who sets
`data.glob` and forgets `data.source` would train on another text without a
warning. Three more facts say whether a field may change when a run is resumed,
whether it may differ between replicas that are separate programs, and whether
its default is chosen for the devices.
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
  "mailbox". The deciding field of `mailbox.quorum` is `exchange.collective`.

  Attributes:
    field: Dotted name of the deciding field.
    holds: Function from the value of the deciding field to a bool: whether the
      run reads the field that has this condition.
  """

  field: str
  holds: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Facts:
  """Facts about a field of the config.

  Attributes:
    read_if: Condition under which a run reads the field; None: every run does.
    is_free_on_resume: Whether the field may change when a run is resumed. Such
      a field changes no result of the run: only what is recorded, or which
      devices compute the result.
    may_differ: Whether the field may differ between replicas that are separate
      programs and exchange through a mailbox.
    is_left_to_device: Whether the default value, None or "auto", means that the
      program chooses a value for the devices on which it runs
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
  """Declares a field of a section of a config, with its facts and its limits.

  Args:
    default: Default value of the field.
    read_if: Condition under which a run reads the field; None: every run does.
    is_free_on_resume: Whether the field may change when a run is resumed. Such
      a field may also differ between separate programs, whatever `may_differ`
      says.
    may_differ: Whether the field may differ between replicas that are separate
      programs.
    is_left_to_device: Whether the default value, None or "auto", means that the
      program chooses a value for the devices on which it runs.
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
  """Returns the facts about a field.

  Args:
    field: Field of a dataclass of the config. If it was declared without
      `setting`, the result is the default of each fact.
  """
  return field.metadata.get(_FACTS, Facts())
