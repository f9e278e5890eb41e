"""Lists the runs of a sweep: a name and a checked config for each.

A *setting* is a name with the values of some fields. It becomes a run for each
of its seeds. This module does not load JAX.
"""

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dilocox_jax.checks import (
  check_path,
  flat,
  in_front,
  known,
  of_type,
  require,
)
from dilocox_jax.config import RunConfig, free_on_resume, from_mapping
from dilocox_jax.config.recipes import DEFAULTS
from dilocox_jax.config.sections import DataConfig
from dilocox_jax.plan.schedule.methods import method_parts, takes

# Fields of a sweep's config that say what is trained, with their types.
_FIELDS_OF_RUNS = {
  "base": dict,
  "grid": dict | None,
  "runs": list | tuple | None,
  "seeds": list | tuple,
  "rows": str | None,
}
# Fields about its page. `judged` says whether the page shows the losses on the
# judge text instead of the validation text. A sweep that chooses settings must
# not show them.
_FIELDS_OF_PAGE = {
  "clocks": list | tuple,
  "baseline": str | None,
  "baselines": dict | None,
  "target_loss": float,
  "front": list | tuple,
  "notes": list | tuple,
  "judged": bool,
}
_TYPES = {**_FIELDS_OF_RUNS, **_FIELDS_OF_PAGE}
FIELDS = tuple(_TYPES)
# Fields that the digest ignores, because they change no result of a run. The
# fields of `evaluation` are free on resume as well, but the digest contains
# them, because they decide which points the curve of a run has. How many steps
# are dispatched as one program changes no loss.
_IGNORED = (
  *(field for field in free_on_resume() if not field.startswith("evaluation.")),
  "sync.steps_per_dispatch",
)
# Settings of a method's schedule: H, P and tau.
SCHEDULE = ("sync_interval", "num_fragments", "overlap_steps")
# Bytes of a name in the name of a directory, which may have 255 bytes.
_MAX_NAME_BYTES = 120


@dataclasses.dataclass(frozen=True)
class SweepRun:
  """A training run of a sweep.

  Attributes:
    name: Name of the setting: runs that differ only in the seed share it.
    config: The whole checked config, with its seed. It states `sync_interval`,
      `num_fragments` and `overlap_steps`, even at the method's usual values.
      Two kinds of these fields are None: fields that the method does not take,
      and fields that its name states, as in "diloco(sync_interval=8)".
  """

  name: str
  config: RunConfig

  @property
  def seed(self) -> int:
    """Seed of the run."""
    return self.config.seed

  @property
  def overrides(self) -> dict[str, Any]:
    """Values that make the config (`from_mapping`), by dotted name.

    They are the values that differ from their defaults, and all values whose
    defaults follow from other fields, such as the method.
    """
    # A later version may have other defaults, which must not change this run.
    return self._changed(always=(*DEFAULTS, "inner.warmup_steps"))

  def _changed(self, always: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the values that are not at their defaults, by dotted name.

    Fields in `always` are included even at their defaults, unless their value
    is None.
    """
    defaults = flat(RunConfig().to_mapping())
    for path in always:
      defaults[path] = None
    values = flat(self.config.to_mapping())
    return {
      path: value for path, value in values.items() if value != defaults[path]
    }

  @functools.cached_property
  def digest(self) -> str:
    """Digest of the config: twelve hexadecimal digits.

    Two configs have the same digest if they differ only in fields that change
    no result of a run.
    """
    # Defaults are left out, so that a field that a later version adds does not
    # change the digests of older runs.
    values = {
      path: value
      for path, value in self._changed().items()
      if not _is_ignored(path)
    }
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

  @property
  def label(self) -> str:
    """Readable text with which the name of the run's directory begins.

    Example: "overlap_loco,_AdamW,_2x4-seed0".
    """
    name = re.sub(r"[^\w.,=+-]+", "_", self.name)
    # A letter may have up to four bytes. If the cut divides a letter, the
    # letter is left out.
    name = name.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
    return f"{name}-seed{self.seed}"

  @property
  def arguments(self) -> list[str]:
    """Flags of `experiments.train` that give its config the run's values.

    Example: ["--config.seed=1", "--config.sync.method=diloco"].
    """
    return [
      f"--config.{path}={value}" for path, value in self.overrides.items()
    ]


def _is_ignored(path: str) -> bool:
  """Returns whether `_IGNORED` has a field (dotted name) or its section."""
  return any(f"{path}.".startswith(f"{field}.") for field in _IGNORED)


def text_of(config: RunConfig) -> tuple[DataConfig, int]:
  """Returns the settings of a run's text: the section `data`, and a seed.

  Two runs read the same text if the results are equal. So values that do not
  change the text are the same in every result: the sizes of batches and
  sequences are 1. The seed is that of the config for a synthetic text, and 0
  for any other text.
  """
  data = dataclasses.replace(config.data, batch_size=1, sequence_length=1)
  seed = config.seed if data.source == "synthetic" else 0
  return data, seed


def check_field(path: str) -> None:
  """Raises ValueError unless the config of a sweep may have a field.

  `path` is the dotted name of the field, e.g. "base.sync.sync_interval". A name
  that begins with `base` or `grid` is checked as a whole. Of any other name
  only the first part is checked. The message names the field with the nearest
  name.
  """
  head, _, config_path = path.partition(".")
  known("field", head, FIELDS)
  if head in ("base", "grid") and config_path:
    check_path(RunConfig, config_path)


def check_fields(sweep: Mapping[str, Any]) -> None:
  """Checks names and types of the fields of a sweep's config.

  Raises:
    ValueError: If a field does not exist or has another type. The message is
      one line, which names the field.
  """
  for field, value in sweep.items():
    check_field(field)
    of_type(field, value, _TYPES[field])


def runs_of(
  sweep: Mapping[str, Any], rows: Iterable[tuple[str, Mapping[str, Any]]] = ()
) -> list[SweepRun]:
  """Lists the runs of a sweep in the order in which they should start.

  A *setting* is a name with the values of some fields, and becomes a run for
  each seed. Runs with the same `digest` would have the same result, so the list
  has only the first of them.

  Args:
    sweep: Mapping with some of `FIELDS`:

      - `base` is a config. Fields that it lacks have their defaults.
      - `grid` maps fields (dotted or nested) to lists of values. Every
        combination of these values becomes a setting.
      - `runs` is a list of settings: mappings of fields (dotted or nested) to
        values. A setting may also have a `name` and a `seed`.
      - `seeds` are the seeds of all settings that have no `seed`. By default
        such a setting has the seed of `base`.
      - `baseline` must be the name of a run, if there is a `grid` or `runs`.

    rows: Name and overrides of finished runs (`Rows.settings`). If the sweep
      has neither `grid` nor `runs`, these are its runs. Then `base` and `seeds`
      are not used.

  Raises:
    ValueError: If a field is wrong or a config is not possible. The message is
      one line; it names the field, and the run if a run is wrong.
  """
  check_fields(sweep)
  base = sweep.get("base", {})
  seeds = sweep.get("seeds", (base.get("seed", 0),))
  require(
    _is_filled_list(seeds),
    f"seeds={seeds!r} must be a list of at least one seed",
  )
  settings = _named([*_product(sweep), *_listed(sweep)])
  if not settings:
    return [_run(name, {}, overrides) for name, overrides in rows]
  runs: dict[str, SweepRun] = {}
  for name, changed in settings:
    setting_seeds = [changed["seed"]] if "seed" in changed else seeds
    for seed in setting_seeds:
      run = _run(name, base, changed | {"seed": seed})
      runs.setdefault(run.digest, run)
  baseline = sweep.get("baseline")
  if baseline:
    known("baseline", baseline, [run.name for run in runs.values()])
  return list(runs.values())


def _run(
  name: str, base: Mapping[str, Any], changed: Mapping[str, Any]
) -> SweepRun:
  """Returns a run whose config is `base` with the values `changed`.

  Raises ValueError, with the name of the run, if the config is not possible or
  the name cannot be printed.
  """
  with in_front(f"run {name!r}: "):
    require(name.isprintable(), "its name must be one line of plain text")
    for path in changed:
      check_path(RunConfig, path)
    config = from_mapping(flat(base) | dict(changed))
    return SweepRun(name, _with_schedule(config))


def _with_schedule(config: RunConfig) -> RunConfig:
  """Fills in the fields of `SCHEDULE` that are None in a config.

  They get the method's usual values. Fields that the method does not take, or
  that its name has, as in "diloco(sync_interval=8)", stay None.
  """
  method, settings_in_name = method_parts(config.sync.method)
  stated = {}
  for setting in SCHEDULE:
    is_open = getattr(config.sync, setting) is None
    if is_open and takes(method, setting) and setting not in settings_in_name:
      stated[setting] = getattr(config.sync.named.schedule, setting)
  if not stated:
    return config
  sync = dataclasses.replace(config.sync, **stated)
  return dataclasses.replace(config, sync=sync)


def baseline_of(sweep: Mapping[str, Any], name: str) -> str:
  """Returns the name of the runs with which the runs `name` are compared.

  The field `baselines` of the sweep maps names of runs to their baselines. A
  name that it lacks has the baseline in the field `baseline`. The result is ""
  if the sweep names no baseline. It may be `name` itself.
  """
  baselines = sweep.get("baselines") or {}
  return baselines.get(name, sweep.get("baseline", ""))


def changes(runs: Sequence[SweepRun]) -> dict[str, str]:
  """Returns how the runs of each name differ from the other runs, by name.

  Example: {"short rounds": "sync_interval=10 outer.momentum=0.6"}. The fields
  are those in which any two names differ, without the seed. A field that a run
  has at its default is left out.
  """
  defaults = flat(RunConfig().to_mapping())
  # If names repeat, a dict keeps the last value. In reverse order that is the
  # value of the first run.
  values_by_name = {
    run.name: flat(run.config.to_mapping()) for run in reversed(runs)
  }
  varied = []
  for path in defaults:
    all_values = {str(values[path]) for values in values_by_name.values()}
    if path != "seed" and len(all_values) > 1:
      varied.append(path)
  words = {}
  for name, values in values_by_name.items():
    changed = {
      path: values[path] for path in varied if values[path] != defaults[path]
    }
    words[name] = _words(changed)
  return words


# Name of a setting, "" if it has none yet, and its values by dotted name.
_Setting = tuple[str, dict[str, Any]]


def _product(sweep: Mapping[str, Any]) -> Iterator[_Setting]:
  """Yields the values of every combination in the grid, with "" as their name.

  Raises ValueError if a field does not exist, or its values are no list.
  """
  grid = flat(sweep.get("grid") or {})
  for path, values in grid.items():
    require(
      _is_filled_list(values),
      f"grid.{path}={values!r} must be a list of values",
    )
    check_path(RunConfig, path)
  if grid:
    for combination in itertools.product(*grid.values()):
      yield "", dict(zip(grid, combination, strict=True))


def _listed(sweep: Mapping[str, Any]) -> Iterator[_Setting]:
  """Yields name and values of every entry in the field `runs` of a sweep.

  Raises ValueError if an entry is no mapping.
  """
  for number, setting in enumerate(sweep.get("runs") or ()):
    require(
      isinstance(setting, Mapping),
      f"runs[{number}]={setting!r} must map fields to values",
    )
    changed = dict(setting)
    name = changed.pop("name", "")
    yield str(name), flat(changed)


def _is_filled_list(value: Any) -> bool:
  """Returns whether a value of a config is a list or tuple, and not empty."""
  return isinstance(value, list | tuple) and bool(value)


def _named(settings: list[_Setting]) -> list[_Setting]:
  """Names settings (values of fields) without a name; leaves out repeated ones.

  A name lists the changed fields without the seed, e.g.
  "sync_interval=30,inner.learning_rate=0.002", or is "base" if there are none.
  Raises ValueError if two settings with the same name and seed differ.
  """
  by_name: dict[tuple[str, Any], dict[str, Any]] = {}
  for name, changed in settings:
    if not name:
      fields = {
        path: value for path, value in changed.items() if path != "seed"
      }
      name = _words(fields, separator=",") or "base"
    key = (name, changed.get("seed"))
    if by_name.setdefault(key, changed) != changed:
      raise ValueError(f"two runs are called {name!r}: rename one of them")
  return [(name, changed) for (name, _), changed in by_name.items()]


def _words(values: Mapping[str, Any], separator: str = " ") -> str:
  """Returns fields with their values, e.g. "rank=8 outer.momentum=0.6"."""
  words = []
  for path, value in values.items():
    text = f"{value:g}" if isinstance(value, float) else str(value)
    words.append(f"{short_name(path)}={text}")
  return separator.join(words)


def short_name(path: str) -> str:
  """Returns the shortest name of a config's field that no other field has.

  Examples: "sync_interval" for "sync.sync_interval", but "outer.momentum" with
  its section, because the section `inner` has a field `momentum`, too. A field
  called `name` always keeps its section.
  """
  last = path.rpartition(".")[2]
  names = collections.Counter(
    field.rpartition(".")[2] for field in flat(RunConfig().to_mapping())
  )
  # "name" alone would be read as the name of the run.
  if last == "name" or names[last] != 1:
    return path
  return last
