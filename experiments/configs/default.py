"""The default run: DiLoCo on Python's own library, sized for a laptop.

`dilocox_jax/config/sections.py` and `dilocox_jax/config/run.py` explain the
fields, and the command line can set each of them. A method brings its own
codec, optimizers and feedback, which the command line can replace:
--config.sync.method=muloco --config.exchange.codec="int(bits=4)".

A file of values, such as the config.json of a run, follows a colon:
--config=experiments/configs/default.py:runs/default/config.json.

Claim: none. Cost: two minutes on two CPU cores.

    python -m experiments.train --config=experiments/configs/default.py \
        --workdir=runs/default --config.sync.sync_interval=50
"""

import dataclasses
import typing

from ml_collections import config_dict

from dilocox_jax.checks import json_file
from dilocox_jax.config import RunConfig


def get_config(path: str = "") -> config_dict.ConfigDict:
  """Returns a locked config that has every field of `RunConfig`.

  Fields whose usual values follow from `config.sync.method` are None, unless
  the file `path` sets them.

  Args:
    path: JSON file whose values replace the defaults, such as the config.json
      of a run; "" means no file.

  Raises:
    ValueError: If the file cannot be read or holds no JSON object.
    KeyError: If a name in the file is no field.
    TypeError: If the value of a field has a wrong type.
    AttributeError: If the value of a section is not an object.
  """
  config = _section(RunConfig)
  config.lock()
  if path:
    config.update(json_file(path))
  return config


def sweep() -> config_dict.ConfigDict:
  """Returns a sweep without runs, whose `base` is the default run.

  docs/commands.md lists the fields of a sweep.
  """
  # A grid, e.g. {"sync.sync_interval": (10, 30)}, must stay a plain dict: a
  # `ConfigDict` refuses keys with dots.
  config = config_dict.ConfigDict(convert_dict=False)
  config.base = get_config()
  return config


def _section(kind: type) -> config_dict.ConfigDict:
  """Returns the defaults of a dataclass, with its nested dataclasses.

  `kind` is `RunConfig` or a section of it.
  """
  section = config_dict.ConfigDict()
  kinds = typing.get_type_hints(kind)
  for field in dataclasses.fields(kind):
    if dataclasses.is_dataclass(field.default):
      section[field.name] = _section(kinds[field.name])
    elif field.default is None:
      # A placeholder has a type, so that a flag can set the field.
      kind_if_set = typing.get_args(kinds[field.name])[0]
      section[field.name] = config_dict.placeholder(kind_if_set)
    else:
      section[field.name] = field.default
  return section
