"""One run that a sweep needs: its checked config, and when two runs are one.

Ablations and convergence sweeps describe their runs with what is here. A run
that has been made must be recognised later, in another process or in a fresh
clone, so its config is summed up in one digest. Nothing here loads JAX.
"""

import collections
import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from dilocox_jax.checks import known
from dilocox_jax.config import FREE_ON_RESUME, RunConfig, from_mapping
from dilocox_jax.config.recipes import RECIPES
from dilocox_jax.mapping import check_path, flat

# Fields that change no number of a run. The evaluation interval may change
# when a run is resumed, but it decides which points the run's curve has.
_IGNORED = tuple(f for f in FREE_ON_RESUME if not f.startswith("evaluation."))
_MAX_NAME_CHARACTERS = 120  # A directory's name has 255 bytes at most.


@dataclasses.dataclass(frozen=True)
class RequiredRun:
  """A training run that a sweep needs.

  Attributes:
    task: Task of the sweep that needs the run, e.g. "tune_inner".
    name: Name of the method, or of the setting of an ablation. All seeds of a
      method share it.
    changed: Values by dotted field that are set over the sweep's base.
    config: The whole config, checked, seed included.
  """

  task: str
  name: str
  changed: Mapping[str, Any]
  config: RunConfig

  @property
  def seed(self) -> int:
    """The seed of the run."""
    return self.config.seed

  @property
  def label(self) -> str:
    """The beginning of its directory's name, for people to read."""
    readable = re.sub(r"[^\w.,=+-]+", "_", self.name)[:_MAX_NAME_CHARACTERS]
    return f"{readable}-seed{self.seed}"

  @property
  def arguments(self) -> list[str]:
    """Flags that turn the default config into that of the run.

    A flag is left out only if its value follows from the other flags: the
    method and the codec decide about other fields, the length of the run about
    its warm-up.
    """
    sync, codec = self.config.sync, self.config.codec
    given = {
      "total_steps": self.config.total_steps,
      "sync": {"method": sync.method},
      "codec": {"name": codec.name},
    }
    default = flat(from_mapping(given).to_mapping()) | {
      "total_steps": RunConfig().total_steps,
      "sync.method": RunConfig().sync.method,
      "codec.name": "" if sync.method in RECIPES else RunConfig().codec.name,
    }
    return [
      f"--config.{path}={value}"
      for path, value in flat(self.config.to_mapping()).items()
      if value != default[path]
    ]

  @property
  def ends_round(self) -> bool:
    """Whether the last step ends a round, so that no round is cut short."""
    sync = self.config.sync
    steps = self.config.total_steps - sync.warm_start_steps
    return steps % sync.named.schedule.sync_interval == 0


def run_digest(
  config: RunConfig, counted: Collection[str] | None = None
) -> str:
  """Returns twelve hex digits that two configs share only if they mean one run.

  A new field of the config must not change the digests of runs that were made
  before the field existed. So fields that are not in `counted` have no part in
  the digest as long as they have their default value.

  Example: a sweep began before `model.z_loss` existed. With the default 0 its
  runs keep their digests; a run with z_loss=0.1 gets another one.

  Args:
    config: Config of the run.
    counted: Dotted fields that existed when the sweep was begun; by default
      all that exist.
  """
  default = flat(RunConfig().to_mapping())
  meaning = {
    path: value
    for path, value in flat(config.to_mapping()).items()
    if (counted is None or path in counted or value != default[path])
    and not any(f"{path}.".startswith(f"{field}.") for field in _IGNORED)
  }
  text = json.dumps(meaning, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def checked_config(
  base: Mapping[str, Any], changed: Mapping[str, Any]
) -> RunConfig:
  """Builds the config of a run from a sweep's base and what differs from it.

  Args:
    base: Fields of every run, nested or by dotted name.
    changed: Values by dotted field.

  Raises:
    ValueError: One line that names the field.
  """
  for path in changed:
    check_path(RunConfig, path)
  return from_mapping(nested(flat(base) | dict(changed)))


def check_sweep_field(
  path: str, fields: Collection[str], sections: Collection[str]
) -> None:
  """Checks that the config of a sweep has a field.

  Args:
    path: Dotted name of the field, e.g. "base.sync.sync_interval".
    fields: Names of the sweep's own fields.
    sections: Those of them below which the fields of a run follow.

  Raises:
    ValueError: There is no such field. The message has the nearest name.
  """
  head, _, rest = path.partition(".")
  known("field", head, fields)
  if head in sections and rest:
    check_path(RunConfig, rest)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
  """Turns values by dotted name into sections of fields."""
  sections: dict[str, Any] = {}
  for path, value in values.items():
    *names, last = path.split(".")
    section = sections
    for name in names:
      section = section.setdefault(name, {})
    section[last] = value
  return sections


def short_name(path: str) -> str:
  """Returns a field's name, without its section where no other has it too."""
  last = path.rpartition(".")[2]
  names = collections.Counter(
    field.rpartition(".")[2] for field in flat(RunConfig().to_mapping())
  )
  return last if names[last] == 1 and last != "name" else path
