"""Turns a `ConfigDict` into the checked config of a run; checks its files."""

import pathlib

from ml_collections import config_dict

from dilocox_jax.config import RunConfig, from_mapping
from experiments.runtime import command_line
from experiments.runtime.command_line import UsageError

# No config of a run has these fields, and every config of a sweep has one.
_FIELDS_OF_SWEEPS = ("base", "grid", "runs", "rows")


def set_field(
  values: config_dict.ConfigDict, section: str, field: str, value: str
) -> None:
  """Sets a field of a config, which may lack the section and may be locked."""
  with values.unlocked():
    if section not in values:
      values[section] = config_dict.ConfigDict()
    values[section][field] = value


def run_config(values: config_dict.ConfigDict) -> RunConfig:
  """Checks the fields of a config, and returns the config of a run.

  Raises:
    UsageError: If the config cannot be read, if a field is wrong, or if it is
      the config of a sweep.
  """
  if any(field in values for field in _FIELDS_OF_SWEEPS):
    raise UsageError(
      "--config describes a sweep, and not a run: give it to experiments.sweep"
    )
  kinds = (ValueError, OSError, AttributeError, ImportError)
  with command_line.usage_errors("--config: ", kinds):
    return from_mapping(values.to_dict())


def check_files(config: RunConfig) -> None:
  """Checks that a run's text files and initial checkpoint exist, without JAX.

  Text files are looked for only if data.source is "text_files".

  Raises:
    UsageError: If no file matches a pattern of data.glob, or if
      checkpoint.init_from is set and is not a directory with a config.json.
  """
  data = config.data
  if data.source == "text_files":
    from dilocox_jax.data.documents import matching_files, split_globs

    with command_line.usage_errors("data.glob: "):
      for pattern in split_globs(data.glob):
        matching_files(pattern)
  source = config.checkpoint.init_from
  if source and not (pathlib.Path(source) / "config.json").is_file():
    raise UsageError(
      f"checkpoint.init_from={source} is not a run directory: name the "
      "--workdir of a run that has checkpoints"
    )
