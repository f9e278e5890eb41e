"""Lists the runs of a sweep: names, overrides and seeds.

All runs are checked and named before the first of them starts, since a misspelt
field that is found after an hour of training costs that hour. A finished run is
recognized later, in another process or in a fresh clone, by the digest of its
overrides. This module does not load JAX.
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

from dilocox_jax.checks import check_path, flat, in_front, known, require
from dilocox_jax.config import FREE_ON_RESUME, RunConfig, from_mapping
from dilocox_jax.config.recipes import DEFAULTS
from dilocox_jax.config.sections import DataConfig

# Fields of a sweep's config that say what is trained.
_FIELDS_OF_RUNS = ("base", "grid", "runs", "seeds", "rows")
# Fields about its page. `judged` is whether the page shows the losses on the
# text that judges, which no sweep that chooses settings may show.
_FIELDS_OF_PAGE = (
  "clocks",
  "baseline",
  "baselines",
  "target_loss",
  "front",
  "notes",
  "judged",
)
FIELDS = _FIELDS_OF_RUNS + _FIELDS_OF_PAGE
# Fields that change no result of a run, so that the digest ignores them. The
# fields of `evaluation` may change when a run is resumed, but they decide which
# points the curve of the run has, so that the digest contains them.
_IGNORED = tuple(
  field for field in FREE_ON_RESUME if not field.startswith("evaluation.")
)
_MAX_NAME_BYTES = 120  # The limit of a directory's name is 255 bytes.


@dataclasses.dataclass(frozen=True)
class SweepRun:
  """A training run of a sweep.

  Attributes:
    name: Name of the setting; runs that differ only in the seed share it.
    config: The whole checked config, with its seed.
  """

  name: str
  config: RunConfig

  @property
  def seed(self) -> int:
    """Seed of the run."""
    return self.config.seed

  @property
  def overrides(self) -> dict[str, Any]:
    """Values that make the config, by dotted name.

    A field whose default follows from other fields (the method, the length of
    the run) is always among them, also where it has its default.
    """
    return self._changed(always=(*DEFAULTS, "inner.warmup_steps"))

  def _changed(self, always: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the values that are not at their defaults, by dotted name.

    Args:
      always: Fields that are included unless they are None.
    """
    defaults = flat(RunConfig().to_mapping()) | dict.fromkeys(always)
    values = flat(self.config.to_mapping())
    return {
      path: value for path, value in values.items() if value != defaults[path]
    }

  @functools.cached_property
  def digest(self) -> str:
    """Twelve hexadecimal digits, equal for two configs of the same run.

    Only fields that are not at their defaults count, so a field that a later
    version adds does not change the digests of older runs.
    """
    counted = {
      path: value
      for path, value in self._changed().items()
      if not any(f"{path}.".startswith(f"{field}.") for field in _IGNORED)
    }
    text = json.dumps(counted, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]

  @property
  def label(self) -> str:
    """Readable text with which the name of the run's directory begins."""
    name = re.sub(r"[^\w.,=+-]+", "_", self.name)
    # A letter may have four bytes. The rest of a divided letter is left out.
    name = name.encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
    return f"{name}-seed{self.seed}"

  @property
  def arguments(self) -> list[str]:
    """Flags that turn the default config into the config of the run."""
    return [f"--config.{path}={each}" for path, each in self.overrides.items()]


def text_of(config: RunConfig) -> tuple[DataConfig, int]:
  """Returns the part of a config that decides its text.

  Two runs have the same text if their parts are equal.

  Args:
    config: Config of the run.

  Returns:
    The section `data` with batches of one token, as the size of batches does
    not change the text; and the seed of a synthetic text, 0 for others.
  """
  data = dataclasses.replace(config.data, batch_size=1, sequence_length=1)
  seed = config.seed if data.source == "synthetic" else 0
  return data, seed


def check_field(path: str) -> None:
  """Raises ValueError, with the nearest name, if a sweep has no such field.

  Args:
    path: Dotted name of the field, e.g. "base.sync.sync_interval".
  """
  head, _, rest = path.partition(".")
  known("field", head, FIELDS)
  if head in ("base", "grid") and rest:
    check_path(RunConfig, rest)


def runs_of(
  sweep: Mapping[str, Any], rows: Iterable[tuple[str, Mapping[str, Any]]] = ()
) -> list[SweepRun]:
  """Lists the runs of a sweep in the order in which they should start.

  If two settings give the same config, the list has one run for both, under the
  name of the first.

  Args:
    sweep: Mapping with some of `FIELDS`. `base` is a whole config. `grid` maps
      fields (dotted or nested) to lists of values; every combination becomes a
      setting. `runs` is a list of settings, which map dotted fields to values
      and may have a `name` and a `seed`. `seeds` are those of all settings
      without one; by default that of `base`.
    rows: Name and overrides of finished runs. They are the runs of a sweep that
      has neither `grid` nor `runs`.

  Raises:
    ValueError: If a run is not possible. The message has one line, which names
      the run and the field and says what to change.
  """
  for field in sweep:
    check_field(field)
  base = sweep.get("base", {})
  seeds = sweep.get("seeds", (base.get("seed", 0),))
  is_list = isinstance(seeds, list | tuple) and bool(seeds)
  require(is_list, f"seeds={seeds!r} must be a list of at least one seed")
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
  """Returns a run whose config is `base` with some fields changed.

  Raises:
    ValueError: If the config is not possible. The message names the run.
  """
  with in_front(f"run {name!r}: "):
    for path in changed:
      check_path(RunConfig, path)
    return SweepRun(name, from_mapping(flat(base) | dict(changed)))


def changes(runs: Sequence[SweepRun]) -> dict[str, str]:
  """Returns how each setting differs from the others, in words, by its name.

  Args:
    runs: Runs of a sweep.
  """
  defaults = flat(RunConfig().to_mapping())
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
    changed = {p: values[p] for p in varied if values[p] != defaults[p]}
    words[name] = _words(changed)
  return words


def _product(sweep: Mapping[str, Any]) -> Iterator[tuple[str, dict]]:
  """Yields ("", values by dotted field) for every combination in the grid."""
  grid = flat(sweep.get("grid") or {})
  for path, values in grid.items():
    is_list = isinstance(values, list | tuple) and bool(values)
    require(is_list, f"grid.{path}={values!r} must be a list of values")
    check_path(RunConfig, path)
  if grid:
    for combination in itertools.product(*grid.values()):
      yield "", dict(zip(grid, combination, strict=True))


def _listed(sweep: Mapping[str, Any]) -> Iterator[tuple[str, dict]]:
  """Yields (name, values by dotted field) for every setting in `runs`."""
  for number, setting in enumerate(sweep.get("runs") or ()):
    message = f"runs[{number}]={setting!r} must map fields to values"
    require(isinstance(setting, Mapping), message)
    changed = dict(setting)
    name = changed.pop("name", "")
    yield str(name), flat(changed)


def _named(settings: list[tuple[str, dict]]) -> list[tuple[str, dict]]:
  """Gives every setting a name and drops settings that are repeated."""
  by_name: dict[tuple[str, Any], dict] = {}
  for name, changed in settings:
    if not name:
      fields = {path: x for path, x in changed.items() if path != "seed"}
      name = _words(fields, ",") or "base"
    key = (name, changed.get("seed"))
    if by_name.setdefault(key, changed) != changed:
      raise ValueError(f"two runs are called {name!r}: rename one of them")
  return [(name, changed) for (name, _), changed in by_name.items()]


def _words(values: Mapping[str, Any], between: str = " ") -> str:
  """Names values, e.g. "rank=8 outer.momentum=0.6"."""
  words = []
  for path, value in values.items():
    text = f"{value:g}" if isinstance(value, float) else str(value)
    words.append(f"{short_name(path)}={text}")
  return between.join(words)


def short_name(path: str) -> str:
  """Returns the name of a field, without its section if the name is unique.

  Args:
    path: Dotted name of the field, e.g. "sync.sync_interval".
  """
  last = path.rpartition(".")[2]
  names = collections.Counter(
    field.rpartition(".")[2] for field in flat(RunConfig().to_mapping())
  )
  return last if names[last] == 1 and last != "name" else path
