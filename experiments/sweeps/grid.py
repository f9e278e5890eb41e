"""A grid or a list of overrides, turned into checked and named trials.

Everything that can be wrong is found here, for all trials and before the first
of them starts: an ablation that breaks after an hour at a misspelt field is an
hour lost. Nothing here loads JAX.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dilocox_jax.checks import known
from dilocox_jax.config import FREE_ON_RESUME, RunConfig, from_mapping
from dilocox_jax.mapping import check_path, flat
from dilocox_jax.plan.model.shapes import parameter_shapes
from dilocox_jax.plan.wire.traffic import Traffic

ABLATION_FIELDS = ("base", "grid", "runs", "seeds")
_MAX_NAME_CHARACTERS = 120  # A directory's name has 255 bytes at most.


@dataclasses.dataclass(frozen=True)
class Trial:
  """One run: a setting and a seed.

  Attributes:
    name: Of the setting; all its seeds share it.
    changed: Dotted fields that the setting gives, with their values.
    config: The whole config, seed included.
  """

  name: str
  changed: Mapping[str, Any]
  config: RunConfig

  @property
  def digest(self) -> str:
    """Eight digits that two trials share only if they mean the same run."""
    values = flat(self.config.to_mapping())
    meaning = {
      path: value
      for path, value in values.items()
      if not any(f"{path}.".startswith(f"{free}.") for free in FREE_ON_RESUME)
    }
    text = json.dumps(meaning, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]

  @property
  def directory(self) -> str:
    """Name of its directory: the setting and seed to read, then the digest."""
    readable = re.sub(r"[^\w.,=+-]+", "_", self.name)[:_MAX_NAME_CHARACTERS]
    return f"{readable}-seed{self.config.seed}-{self.digest}"

  @property
  def arguments(self) -> list[str]:
    """Flags that make the default config this one."""
    default = flat(RunConfig().to_mapping())
    return [
      f"--config.{path}={value}"
      for path, value in flat(self.config.to_mapping()).items()
      if value != default[path]
    ]

  @property
  def times_fewer_bytes(self) -> float:
    """Bytes of a sync in fp32 over those of the trial's codec.

    NaN where there is no one number: nothing is sent, or the codec adapts.
    """
    config = self.config
    if config.adaptive.mode != "off":
      return math.nan
    plain = Traffic(
      config.sync.named,
      config.fragments,
      parameter_shapes(config.model.shape),
      config.mesh.num_replicas,
    )
    coded = dataclasses.replace(
      plain,
      payload=config.codec.payload,
      collective=config.exchange.collective,
    )
    sent_bytes = _sync_bytes(coded)
    return _sync_bytes(plain) / sent_bytes if sent_bytes else math.nan


def _sync_bytes(traffic: Traffic) -> int:
  if traffic.method.exchanged == "gradient":
    return traffic.gradient_bytes()
  count = traffic.method.schedule.num_fragments
  return sum(traffic.exchange_bytes(fragment) for fragment in range(count))


def check_ablation_field(path: str) -> None:
  """Raises ValueError, with the nearest name, for no field of an ablation."""
  head, _, rest = path.partition(".")
  known("field of an ablation", head, ABLATION_FIELDS)
  if head in ("base", "grid") and rest:
    check_path(RunConfig, rest)


def trials(ablation: Mapping[str, Any]) -> list[Trial]:
  """All runs of an ablation, in the order in which they should go.

  Settings that mean the same run are kept once, under the first name, so that
  lines of a chart may share a point.

  Args:
    ablation: `base`, a whole config; `grid`, values to combine by field
      (dotted or nested); `runs`, a list of overrides by dotted field, each
      with a `name` if it should have one; `seeds`, default that of `base`.

  Raises:
    ValueError: One line that names the run, the field and what to change.
  """
  for field in ablation:
    check_ablation_field(field)
  base = ablation.get("base", {})
  settings = _named([*_product(ablation), *_listed(ablation)])
  seeds = ablation.get("seeds") or (base.get("seed", 0),)
  made = {}
  for name, changed in settings:
    for seed in seeds:
      trial = Trial(name, changed, _config(base, name, changed, seed))
      made.setdefault(trial.digest, trial)
  return list(made.values())


def varied(all_trials: Sequence[Trial]) -> list[str]:
  """Dotted fields that do not have one value in all trials."""
  fields = dict.fromkeys(p for trial in all_trials for p in trial.changed)
  return [
    path
    for path in fields
    if len({str(setting(trial, path)) for trial in all_trials}) > 1
  ]


def setting(trial: Trial, path: str) -> Any:
  """The value of a field, given by the setting or by the base."""
  return flat(trial.config.to_mapping())[path]


def _product(ablation: Mapping[str, Any]) -> Iterator[tuple[str, dict]]:
  grid = flat(ablation.get("grid") or {})
  for path, values in grid.items():
    if not isinstance(values, list | tuple) or not values:
      raise ValueError(f"grid.{path}={values!r} must be a list of values")
    check_path(RunConfig, path)
  if grid:
    for chosen in itertools.product(*grid.values()):
      yield "", dict(zip(grid, chosen, strict=True))


def _listed(ablation: Mapping[str, Any]) -> Iterator[tuple[str, dict]]:
  for number, given in enumerate(ablation.get("runs") or ()):
    if not isinstance(given, Mapping):
      raise ValueError(f"runs[{number}]={given!r} must map fields to values")
    changed = dict(given)
    name = changed.pop("name", "")
    yield str(name), flat(changed)


def _named(settings: list[tuple[str, dict]]) -> list[tuple[str, dict]]:
  if not settings:
    raise ValueError("nothing to run: give the ablation a grid or runs")
  named = [(name or name_of(changed), changed) for name, changed in settings]
  by_name: dict[str, dict] = {}
  for name, changed in named:
    if by_name.setdefault(name, changed) != changed:
      raise ValueError(f"two runs are called {name!r}: rename one")
  return list(by_name.items())


def name_of(changed: Mapping[str, Any]) -> str:
  """A name for a setting, e.g. "rank=8,outer.momentum=0.6".

  It depends on this setting alone, so it stays when a grid grows.
  """
  parts = [f"{short(path)}={_text(value)}" for path, value in changed.items()]
  return ",".join(parts) or "base"


def short(path: str) -> str:
  """A field without its section where no other section has it too."""
  last = path.rpartition(".")[2]
  names = collections.Counter(
    each.rpartition(".")[2] for each in flat(RunConfig().to_mapping())
  )
  return last if names[last] == 1 and last != "name" else path


def _text(value: Any) -> str:
  return f"{value:g}" if isinstance(value, float) else str(value)


def _config(
  base: Mapping[str, Any], name: str, changed: Mapping[str, Any], seed: int
) -> RunConfig:
  try:
    if "seed" in changed:
      raise ValueError("seed is no setting: give the ablation's seeds")
    values = flat(base) | dict(changed) | {"seed": seed}
    for path in changed:
      check_path(RunConfig, path)
    return from_mapping(nested(values))
  except ValueError as error:
    raise ValueError(f"run {name!r}: {error}") from error


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
  """Values by dotted names as sections of fields."""
  made: dict[str, Any] = {}
  for path, value in values.items():
    *sections, last = path.split(".")
    section = made
    for each in sections:
      section = section.setdefault(each, {})
    section[last] = value
  return made
