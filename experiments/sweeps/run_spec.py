"""Describes a run that a sweep needs, and computes the digest of its config.

Ablations and convergence sweeps use this module. A sweep must recognise a
finished run later, in another process or in a fresh clone. Two runs are the
same if the digests of their configs are equal. This module does not load JAX.
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

# These fields change no number of a run, so the digest ignores them. The fields
# of `evaluation` may change when a run is resumed, but they decide which points
# the run's curve has, and replicas may join or leave a run, but those that it
# begins with decide its numbers. So the digest contains both.
_IGNORED = tuple(
  field
  for field in FREE_ON_RESUME
  if not field.startswith("evaluation.") and field != "mesh.num_replicas"
)
_MAX_NAME_CHARACTERS = 120  # The limit of a directory's name is 255 bytes.


@dataclasses.dataclass(frozen=True)
class RequiredRun:
  """A training run that a sweep needs.

  Attributes:
    task: Task of the sweep that needs the run, e.g. "tune_inner".
    name: Name of the method, or of the setting of an ablation. Runs of one
      method that differ only in the seed have the same name.
    changed: Values that replace those of the sweep's base, by dotted name of
      the field.
    config: The whole checked config of the run, with its seed.
  """

  task: str
  name: str
  changed: Mapping[str, Any]
  config: RunConfig

  @property
  def seed(self) -> int:
    """Seed of the run's config."""
    return self.config.seed

  @property
  def label(self) -> str:
    """Readable text with which the name of the run's directory begins."""
    name = re.sub(r"[^\w.,=+-]+", "_", self.name)[:_MAX_NAME_CHARACTERS]
    return f"{name}-seed{self.seed}"

  @property
  def arguments(self) -> list[str]:
    """Flags that turn the default config into the config of the run.

    A flag is left out only if its value follows from the other flags. The
    method and the codec set defaults of other fields, and the length of the run
    sets the default of its warm-up.
    """
    sync, codec = self.config.sync, self.config.codec
    deciding_fields = {
      "total_steps": self.config.total_steps,
      "sync": {"method": sync.method},
      "codec": {"name": codec.name},
    }
    default = flat(from_mapping(deciding_fields).to_mapping()) | {
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
    """Whether the last step of the run is also the last step of a round."""
    sync = self.config.sync
    steps = self.config.total_steps - sync.warm_start_steps
    return steps % sync.named.schedule.sync_interval == 0


def run_digest(
  config: RunConfig, counted: Collection[str] | None = None
) -> str:
  """Computes a digest that is equal for two configs of the same run.

  A new field of the config must not change the digests of runs that were made
  before the field existed. So a field that is not in `counted` is left out of
  the digest if it has its default value.

  Example: a sweep began before `model.z_loss` existed. Its runs with the
  default 0 keep their digests. A run with z_loss=0.1 gets another digest.

  Args:
    config: Config of the run.
    counted: Dotted names of the fields that existed when the sweep began. The
      default is all fields that exist now.

  Returns:
    Twelve hexadecimal digits.
  """
  default = flat(RunConfig().to_mapping())
  digest_fields = {
    path: value
    for path, value in flat(config.to_mapping()).items()
    if (counted is None or path in counted or value != default[path])
    and not any(f"{path}.".startswith(f"{field}.") for field in _IGNORED)
  }
  text = json.dumps(digest_fields, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def checked_config(
  base: Mapping[str, Any], changed: Mapping[str, Any]
) -> RunConfig:
  """Builds the config of a run from a sweep's base and changed fields.

  Args:
    base: Fields of every run, nested or by dotted name.
    changed: Values that replace those of the base, by dotted name of the field.

  Raises:
    ValueError: If a field is unknown or has a wrong value. The message has one
      line and names the field.
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
    fields: Names of the fields of the sweep itself.
    sections: Fields of the sweep that contain the fields of a run, e.g. "base".

  Raises:
    ValueError: If there is no such field. The message suggests a similar name.
  """
  head, _, rest = path.partition(".")
  known("field", head, fields)
  if head in sections and rest:
    check_path(RunConfig, rest)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
  """Turns {"sync.method": value} into {"sync": {"method": value}}."""
  sections: dict[str, Any] = {}
  for path, value in values.items():
    *names, last = path.split(".")
    section = sections
    for name in names:
      section = section.setdefault(name, {})
    section[last] = value
  return sections


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
