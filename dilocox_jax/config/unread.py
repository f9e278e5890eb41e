"""Fields of a config that a run would ignore.

A field that is set and then ignored misleads: someone who sets `data.glob` and
forgets `data.source` would train on another text without a warning. So every
field that only some runs read stands in one table here, with its condition.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dilocox_jax.plan.choices import OPTIMIZER_OPTIONS
from dilocox_jax.plan.schedule.methods import METHODS

Values = Mapping[str, Any]  # All fields of a run by their dotted names.


@dataclasses.dataclass(frozen=True)
class _Condition:
  """What a run needs in order to read some fields.

  Attributes:
    paths: The fields, by their dotted names.
    are_read: Whether a run with these values reads them.
    remedy: What is missing and what to do, with other fields' values as
      `%(section.field)s`.
  """

  paths: tuple[str, ...]
  are_read: Callable[[Values], bool]
  remedy: str


def _has_part(name: str) -> Callable[[Values], bool]:
  return lambda values: name in values["codec.name"].split("+")


def _has_option(section: str, option: str) -> Callable[[Values], bool]:
  """Whether the optimizer of a section takes an option, as far as is known."""

  def has(values: Values) -> bool:
    options = OPTIMIZER_OPTIONS.get(values[f"{section}.optimizer"])
    return options is None or option in options

  return has


def _sends_gradients(values: Values) -> bool:
  make = METHODS.get(values["sync.method"])
  return make is not None and make().exchanged == "gradient"


def _is_divided(values: Values) -> bool:
  return values["mesh.num_stages"] * values["mesh.num_data_shards"] > 1


def _paths(section: str, *names: str) -> tuple[str, ...]:
  return tuple(f"{section}.{name}" for name in names)


_TABLE = (
  _Condition(
    ("data.glob",),
    lambda values: values["data.source"] == "text_files",
    "data.source=%(data.source)s reads no files: set data.source=text_files",
  ),
  *(
    _Condition(
      (f"{section}.{option}",),
      _has_option(section, option),
      f"{section}.optimizer=%({section}.optimizer)s has no {option}: drop it",
    )
    for section, options in (
      ("inner", ("b1", "b2", "weight_decay", "momentum")),
      ("outer", ("momentum", "nesterov")),
    )
    for option in options
  ),
  _Condition(
    ("inner.final_fraction",),
    lambda values: values["inner.schedule"] != "constant",
    "inner.schedule=constant never decays: take cosine or wsd",
  ),
  _Condition(
    _paths("outer", "optimizer", "learning_rate", "momentum", "nesterov"),
    lambda values: not _sends_gradients(values),
    "sync.method=%(sync.method)s averages gradients and has no outer "
    "optimizer: drop it",
  ),
  _Condition(
    _paths("exchange", "error_feedback", "keep_unsent"),
    lambda values: values["codec.name"] != "float32",
    "codec.name=float32 loses nothing that could be made up for: name another "
    "codec or drop it",
  ),
  _Condition(
    _paths("exchange", "feedback_decay", "feedback_against", "feedback_dtype"),
    lambda values: values["exchange.error_feedback"],
    "there is no residual without feedback: set exchange.error_feedback=True",
  ),
  _Condition(
    ("adaptive.mode", "adaptive.energy"),
    _has_part("low_rank"),
    "codec.name=%(codec.name)s has no rank to follow: take low_rank+int",
  ),
  _Condition(
    _paths("adaptive", "window_rounds", "criterion", "by_leaf"),
    lambda values: values["adaptive.mode"] != "off",
    "adaptive.mode=off changes no rank: take rank or rank_and_interval",
  ),
  _Condition(
    _paths("mesh", "pipeline", "chunks_per_stage", "remat"),
    _is_divided,
    "a replica on one device has no pipeline: set mesh.num_stages",
  ),
  _Condition(
    ("mesh.boundary",),
    lambda values: values["mesh.num_stages"] > 1,
    "one stage sends nothing to another: set mesh.num_stages",
  ),
)


def unread_fields(values: Values, defaults: Values) -> dict[str, str]:
  """Finds fields that are not at their default and that the run ignores.

  Args:
    values: All fields of a run by their dotted names, with values for those
      that a method may set.
    defaults: Default values by dotted names; only these fields are looked at.

  Returns:
    A message for each such field, by its dotted name.
  """
  return {
    path: f"{path}={values[path]!r} would be ignored, as "
    + needs.remedy % values
    for needs in _TABLE
    for path in needs.paths
    if path in defaults
    and values[path] != defaults[path]
    and not needs.are_read(values)
  }
