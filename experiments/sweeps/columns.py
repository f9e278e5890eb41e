"""Names the columns of runs.csv, and turns configs into cells and back.

The most important fields of a config have columns with plain names, such as
`inner_rate`. Any other field has a column only if a run sets it, with its
dotted name, such as `inner.warmup_steps`.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

from dilocox_jax.checks import check_path, flat, require, shown
from dilocox_jax.config import RunConfig
from dilocox_jax.plan.schedule.methods import method_parts, takes
from experiments.sweeps.runs import SCHEDULE, SweepRun

# Field of the config that a column with a plain name holds.
FIELDS = {
  "method": "sync.method",
  "num_replicas": "mesh.num_replicas",
  "batch_size": "data.batch_size",
  "sequence_length": "data.sequence_length",
  "steps": "total_steps",
  "sync_interval": "sync.sync_interval",
  "num_fragments": "sync.num_fragments",
  "overlap_steps": "sync.overlap_steps",
  "codec": "exchange.codec",
  "feedback": "exchange.feedback",
  "inner_optimizer": "inner.optimizer",
  "inner_momentum": "inner.momentum",
  "inner_rate": "inner.learning_rate",
  "outer_rate": "outer.learning_rate",
  "outer_momentum": "outer.momentum",
  "average_power": "outer.average_power",
  "seed": "seed",
}
_COLUMNS = {field: column for column, field in FIELDS.items()}


def cells_of(run: SweepRun) -> dict[str, Any]:
  """Returns the cells of a run's config, by column.

  The columns are all those with plain names (`FIELDS`), and a column for each
  other field that the run sets. `sync_interval`, `num_fragments` and
  `overlap_steps` are those of the method's schedule, e.g. 1, 1 and 0 for
  AllReduce. `inner_momentum` is None if the config sets none.
  """
  values = flat(run.config.to_mapping())
  cells = {column: values[field] for column, field in FIELDS.items()}
  schedule = run.config.sync.named.schedule
  for column in SCHEDULE:
    cells[column] = getattr(schedule, column)
  # In a config a momentum of 0 means that none is set.
  cells["inner_momentum"] = cells["inner_momentum"] or None
  for field, value in run.overrides.items():
    if field not in _COLUMNS:
      cells[field] = value
  return cells


def overrides_of(cells: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the values that make the config of a run, by dotted name.

  `cells` is a result of `cells_of`. The values are meant for `from_mapping`.
  Cells that are None are left out.
  """
  method, settings_in_name = method_parts(cells["method"])
  overrides = {}
  for column, value in cells.items():
    # A schedule's field that the method fixes, or its name has, is left out.
    is_stated = True
    if column in SCHEDULE:
      is_stated = takes(method, column) and column not in settings_in_name
    if is_stated and value is not None:
      overrides[FIELDS.get(column, column)] = value
  return overrides


def value_of(column: str, text: str) -> Any:
  """Converts the text of a cell to the type of the column's field.

  `column` is the dotted name of the field. An empty cell gives None, which
  stands for the field's default.

  Raises:
    ValueError: If there is no such field, if it is a section, or if the text
      does not fit its type.
  """
  check_path(RunConfig, column)
  require(column in _kinds(), f"{shown(column)} is a section")
  if not text:
    return None
  kind = _kinds()[column]
  if kind is not bool:
    return kind(text)
  require(text in ("True", "False"), f"{shown(text)} is neither True nor False")
  return text == "True"


def kind_of(column: str) -> type:
  """Returns the type of the cells of a column with a plain name (`FIELDS`)."""
  return _kinds()[FIELDS[column]]


@functools.cache
def _kinds() -> dict[str, type]:
  """Returns the type of each field of a config, by dotted name."""
  return dict(_kinds_in(RunConfig, ""))


def _kinds_in(section: type, prefix: str) -> list[tuple[str, type]]:
  """Returns dotted name and type of each field of a config or a section of it.

  `prefix` is the start of the names, e.g. "sync."; "" for `RunConfig`.
  """
  kinds = []
  for name, hint in typing.get_type_hints(section).items():
    if dataclasses.is_dataclass(hint):
      kinds += _kinds_in(typing.cast(type, hint), f"{prefix}{name}.")
    else:
      # A field that may be None has the hint `kind | None`.
      kinds.append((prefix + name, (typing.get_args(hint) or (hint,))[0]))
  return kinds
