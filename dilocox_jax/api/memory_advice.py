"""Suggests a change of a config with which a run needs less device memory.

One field is changed at a time. Changes that need no more devices are tried
first, e.g. more recomputation; then twice as many shards or stages.
"""

from typing import Any

from dilocox_jax.checks import flat
from dilocox_jax.config.device_memory import device_memory
from dilocox_jax.config.run import RunConfig
from dilocox_jax.report.units import human_bytes


def memory_advice(config: RunConfig, device_bytes: float) -> str:
  """Returns words for a change of the config that saves memory on a device.

  They name the first change with which the run fits into `device_bytes`, or
  else the one that needs the least memory: "mesh.gather='layer' needs 24.9 GB".
  If no change saves memory, they suggest a smaller model, batch or rank.
  """
  needed_before = device_memory(config, device_bytes).total
  best = (needed_before, "a smaller model or batch, or a smaller rank")
  for field, value in _changes(config):
    try:
      changed = RunConfig.from_mapping(
        flat(config.to_mapping()) | {field: value}
      )
    except ValueError:
      continue  # The field does not go with the config.
    needed_bytes = device_memory(changed, device_bytes).total
    words = f"{field}={value!r} needs {human_bytes(needed_bytes)}"
    if needed_bytes <= device_bytes:
      return words
    if needed_bytes < best[0]:
      best = (needed_bytes, words)
  return best[1]


def _changes(config: RunConfig) -> list[tuple[str, Any]]:
  """Returns the changes to try, in order: pairs (dotted name, new value).

  Some may not go with the config.
  """
  mesh = config.mesh
  changes: list[tuple[str, Any]] = []
  if mesh.layout == "mesh":
    changes.append(("mesh.remat", "full"))
    changes.append(("mesh.gather", "layer"))
  else:
    changes.append(("model.remat", "full"))
  steps = config.inner.accumulate_steps
  changes.append(("inner.accumulate_steps", 2 * steps))
  if mesh.layout == "mesh":
    changes.append(("mesh.num_data_shards", 2 * mesh.num_data_shards))
    changes.append(("mesh.num_tensor_shards", 2 * mesh.num_tensor_shards))
    changes.append(("mesh.num_stages", 2 * mesh.num_stages))
  return changes
