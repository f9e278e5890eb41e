"""The runs of an ablation: a grid or a list of settings, checked and named.

All runs are checked before the first of them starts, since a misspelt field
that is found after an hour of training costs that hour. Nothing here loads JAX.
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
  """Raises ValueError, with the nearest name, if an ablation lacks a field."""
  run_spec.check_sweep_field(path, ABLATION_FIELDS, ("base", "grid"))


def trials(ablation: Mapping[str, Any]) -> list[RequiredRun]:
  """Lists the runs of an ablation in the order in which they should be made.

  Settings that mean the same run are kept once, under the first name, so that
  two lines of a chart may share a point.

  Args:
    ablation: `base`, a whole config; `grid`, the values to combine by field
      (dotted or nested); `runs`, a list of values by dotted field, each with a
      `name` if it should have one; `seeds`, by default the seed of `base`.

  Raises:
    ValueError: One line that names the run, the field and what to change.
  """
  for field in ablation:
    check_ablation_field(field)
  base = ablation.get("base", {})
  seeds = ablation.get("seeds") or (base.get("seed", 0),)
  runs: dict[str, RequiredRun] = {}
  for name, changed in _named([*_product(ablation), *_listed(ablation)]):
    for seed in seeds:
      with in_front(f"run {name!r}: "):
        message = "seed is no setting: give the ablation's seeds"
        require("seed" not in changed, message)
        config = run_spec.checked_config(base, changed | {"seed": seed})
      run = RequiredRun("ablation", name, changed, config)
      runs.setdefault(run_spec.run_digest(config), run)
  return list(runs.values())


def varied(runs: Sequence[RequiredRun]) -> list[dict[str, Any]]:
  """Returns, run by run, the fields that do not have one value in all runs."""
  values = [flat(run.config.to_mapping()) for run in runs]
  paths = [
    path
    for path in dict.fromkeys(path for run in runs for path in run.changed)
    if len({str(of_run[path]) for of_run in values}) > 1
  ]
  return [{path: of_run[path] for path in paths} for of_run in values]


def times_fewer_bytes(config: RunConfig) -> float:
  """Returns the bytes of a sync in fp32 over those of the run's codec.

  NaN where there is no one number: nothing is sent, or the codec adapts.
  """
  if config.adaptive.mode != "off":
    return math.nan
  coded = to_plan.traffic(config)
  plain = dataclasses.replace(coded, payload=Dense(), collective="auto")
  sent_bytes = _sync_bytes(coded)
  return _sync_bytes(plain) / sent_bytes if sent_bytes else math.nan


def _sync_bytes(traffic: Traffic) -> int:
  if traffic.method.exchanged == "gradient":
    return traffic.gradient_bytes()
  count = traffic.method.schedule.num_fragments
  return sum(traffic.exchange_bytes(fragment) for fragment in range(count))


def _product(ablation: Mapping[str, Any]) -> Iterator[tuple[str, dict]]:
  """Yields every combination of the grid's values, without a name."""
  grid = flat(ablation.get("grid") or {})
  for path, values in grid.items():
    is_list = isinstance(values, list | tuple) and bool(values)
    require(is_list, f"grid.{path}={values!r} must be a list of values")
    check_path(RunConfig, path)
  if grid:
    for chosen in itertools.product(*grid.values()):
      yield "", dict(zip(grid, chosen, strict=True))


def _listed(ablation: Mapping[str, Any]) -> Iterator[tuple[str, dict]]:
  for number, given in enumerate(ablation.get("runs") or ()):
    message = f"runs[{number}]={given!r} must map fields to values"
    require(isinstance(given, Mapping), message)
    changed = dict(given)
    name = changed.pop("name", "")
    yield str(name), flat(changed)


def _named(settings: list[tuple[str, dict]]) -> list[tuple[str, dict]]:
  if not settings:
    raise ValueError("nothing to run: give the ablation a grid or runs")
  by_name: dict[str, dict] = {}
  for given, changed in settings:
    name = given or _name_of(changed)
    if by_name.setdefault(name, changed) != changed:
      raise ValueError(f"two runs are called {name!r}: rename one")
  return list(by_name.items())


def _name_of(changed: Mapping[str, Any]) -> str:
  """Names a setting, e.g. "rank=8,outer.momentum=0.6".

  The name depends on this setting alone, so it stays when the grid grows.
  """
  parts = [
    f"{run_spec.short_name(path)}="
    + (f"{value:g}" if isinstance(value, float) else str(value))
    for path, value in changed.items()
  ]
  return ",".join(parts) or "base"
