"""Lists the runs of an ablation from its grid and its list of settings.

All runs are checked and named before the first of them starts, since a misspelt
field that is found after an hour of training costs that hour. This module does
not load JAX.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dilocox_jax.checks import in_front, require
from dilocox_jax.config import RunConfig, to_plan
from dilocox_jax.mapping import check_path, flat
from dilocox_jax.plan.wire.payload import Dense
from dilocox_jax.plan.wire.traffic import Traffic
from experiments.sweeps import run_spec
from experiments.sweeps.run_spec import RequiredRun

ABLATION_FIELDS = ("base", "grid", "runs", "seeds")


def check_ablation_field(path: str) -> None:
  """Checks that an ablation's config has a field.

  Args:
    path: Dotted name of the field, e.g. "base.sync.sync_interval".

  Raises:
    ValueError: If there is no such field. The message has the nearest name.
  """
  run_spec.check_sweep_field(path, ABLATION_FIELDS, ("base", "grid"))


def trials(ablation: Mapping[str, Any]) -> list[RequiredRun]:
  """Lists the runs of an ablation in the order in which they should start.

  If two settings give the same config, the list has one run for both, under the
  name of the first setting. Two lines of a chart may then share a point.

  Args:
    ablation: Mapping with the fields `ABLATION_FIELDS`. `base` is a whole
      config. `grid` maps fields (dotted or nested) to lists of values; every
      combination of the values becomes a setting. `runs` is a list of settings,
      which map dotted fields to values and may have a `name`. `seeds` is a list
      of integers; by default it has the seed of `base` only.

  Raises:
    ValueError: If a run is not possible. The message has one line, which names
      the run and the field and says what to change.
  """
  for field in ablation:
    check_ablation_field(field)
  base = ablation.get("base", {})
  seeds = ablation.get("seeds") or (base.get("seed", 0),)
  runs: dict[str, RequiredRun] = {}
  for name, changed in _named([*_product(ablation), *_listed(ablation)]):
    for seed in seeds:
      with in_front(f"run {name!r}: "):
        message = "seed may not be set here: give the ablation's seeds"
        require("seed" not in changed, message)
        config = run_spec.checked_config(base, changed | {"seed": seed})
      run = RequiredRun("ablation", name, changed, config)
      runs.setdefault(run_spec.run_digest(config), run)
  return list(runs.values())


def varied(runs: Sequence[RequiredRun]) -> list[dict[str, Any]]:
  """Returns for every run its values of the fields that differ between runs.

  Args:
    runs: Runs of an ablation.

  Returns:
    One mapping per run, from dotted field to value. All have the same fields.
  """
  values = [flat(run.config.to_mapping()) for run in runs]
  paths = [
    path
    for path in dict.fromkeys(path for run in runs for path in run.changed)
    if len({str(fields[path]) for fields in values}) > 1
  ]
  return [{path: fields[path] for path in paths} for fields in values]


def times_fewer_bytes(config: RunConfig) -> float:
  """Returns how many times fewer bytes the run's codec sends than fp32 would.

  Example: if a sync sends 40 MB in fp32 and 5 MB with the codec, the result is
  8. It is NaN if the run sends nothing, or if its codec changes the rank during
  the run, so that no single number is right.
  """
  if config.adaptive.mode != "off":
    return math.nan
  coded = to_plan.traffic(config)
  plain = dataclasses.replace(coded, payload=Dense(), collective="auto")
  sent_bytes = _sync_bytes(coded)
  return _sync_bytes(plain) / sent_bytes if sent_bytes else math.nan


def _sync_bytes(traffic: Traffic) -> int:
  """Returns the bytes that one replica sends to average the whole model once.

  A method that exchanges gradients sends them all in one step. Other methods
  send one fragment at a time, so the bytes of all fragments are added up.
  """
  if traffic.method.exchanged == "gradient":
    return traffic.gradient_bytes()
  count = traffic.method.schedule.num_fragments
  return sum(traffic.exchange_bytes(fragment) for fragment in range(count))


def _product(ablation: Mapping[str, Any]) -> Iterator[tuple[str, dict]]:
  """Yields ("", values by dotted field) for every combination in the grid."""
  grid = flat(ablation.get("grid") or {})
  for path, values in grid.items():
    is_list = isinstance(values, list | tuple) and bool(values)
    require(is_list, f"grid.{path}={values!r} must be a list of values")
    check_path(RunConfig, path)
  if grid:
    for combination in itertools.product(*grid.values()):
      yield "", dict(zip(grid, combination, strict=True))


def _listed(ablation: Mapping[str, Any]) -> Iterator[tuple[str, dict]]:
  """Yields (name, values by dotted field) for every setting in `runs`."""
  for number, setting in enumerate(ablation.get("runs") or ()):
    message = f"runs[{number}]={setting!r} must map fields to values"
    require(isinstance(setting, Mapping), message)
    changed = dict(setting)
    name = changed.pop("name", "")
    yield str(name), flat(changed)


def _named(settings: list[tuple[str, dict]]) -> list[tuple[str, dict]]:
  """Gives every setting a name and drops settings that are repeated."""
  if not settings:
    raise ValueError(
      "the ablation has no settings, so there is nothing to run: set its `grid`"
      " or its `runs`"
    )
  by_name: dict[str, dict] = {}
  for given_name, changed in settings:
    name = given_name or _name_of(changed)
    if by_name.setdefault(name, changed) != changed:
      raise ValueError(f"two runs are called {name!r}: rename one of them")
  return list(by_name.items())


def _name_of(changed: Mapping[str, Any]) -> str:
  """Names a setting, e.g. "rank=8,outer.momentum=0.6".

  The name depends on this setting alone, so it stays the same when values are
  added to the grid.
  """
  parts = [
    f"{run_spec.short_name(path)}="
    + (f"{value:g}" if isinstance(value, float) else str(value))
    for path, value in changed.items()
  ]
  return ",".join(parts) or "base"
