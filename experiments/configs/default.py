"""The default run: DiLoCo on the embedded text, sized for a laptop.

Every field, and what it means, stands in `dilocox_jax/sections.py`,
`sync_sections.py` (what replicas have in common) and `config.py`. Any of them
can be set on the command line.

Claim: none. Cost: two minutes on two CPU cores.

    python -m experiments.train --config=experiments/configs/default.py \
        --workdir=runs/default --config.sync.sync_interval=50
"""

import dataclasses
import typing

from ml_collections import config_dict

from dilocox_jax.config import RunConfig


def get_config() -> config_dict.ConfigDict:
  """Every field at its default, closed to new ones."""
  config = _section(RunConfig())
  config.lock()
  return config


def _section(values) -> config_dict.ConfigDict:
  """A ConfigDict of a dataclass; unset fields keep their type for flags."""
  section = config_dict.ConfigDict()
  for name, kind in typing.get_type_hints(type(values)).items():
    value = getattr(values, name)
    if dataclasses.is_dataclass(kind):
      section[name] = _section(value)
    elif value is None:
      section[name] = config_dict.placeholder(typing.get_args(kind)[0])
    else:
      section[name] = value
  return section
