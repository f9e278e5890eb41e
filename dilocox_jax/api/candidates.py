"""The settings that the adviser compares.

Each candidate is what it changes in a config, by dotted names. A method's own
inner optimizer, codec and feedback follow from its recipe. Outer rate and
momentum are those with which its gap was measured (`expected_gap`). Rounds
have the lengths of `INTERVALS`, and the length that just hides an exchange on
the links at hand.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from dilocox_jax.api.expected_gap import tuned_outer
from dilocox_jax.config import RunConfig, from_mapping

INTERVALS = (4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 500)
_FRAGMENTS, _OVERLAPS = (2, 3, 4, 8), (2, 4, 8, 16)  # Of streaming.
_SLICES = 16  # Of overlap_loco, or as many as a shorter round has steps.
_BITS = {"overlap_loco": (1, 2, 4), "muloco": (2, 4), "dilocox": (4, 8)}
_RANK_SHARES = (8, 4)  # Ranks as shares of the model's width.
_WAITING = ("diloco", "open_diloco", "sparse_loco", "muloco", "eager")
COMPARED_METHODS = (
  "allreduce",
  "cocktail_sgd",
  *_WAITING,
  "streaming_diloco",
  "dilocox",
  "overlap_loco",
)
# Sections that belong to the method. What the user set there is left out.
_OF_METHOD = ("sync", "codec", "exchange", "adaptive", "outer")

Changes = dict[str, Any]


def families(config: RunConfig) -> Iterator[tuple[Changes, tuple[int, ...]]]:
  """Yields settings without H, and the intervals that go with them.

  Args:
    config: Config whose model is trained.
  """
  yield {"sync.method": "allreduce"}, ()
  yield {"sync.method": "cocktail_sgd"}, ()
  for method in COMPARED_METHODS[2:]:
    for changes in _codecs(method, config):
      for schedule in _schedules(method):
        fragments = schedule.get("sync.num_fragments", 1)
        overlap = schedule.get("sync.overlap_steps", 0)
        least = max(fragments, overlap + 1)
        fitting = tuple(h for h in INTERVALS if h >= least)
        yield {"sync.method": method} | changes | schedule, fitting


def _codecs(method: str, config: RunConfig) -> Iterator[Changes]:
  if method == "dilocox":
    width = config.model.shape.model_dim
    for share, bits in itertools.product(_RANK_SHARES, _BITS[method]):
      yield {
        "codec.name": "low_rank+int",
        "codec.rank": max(width // share, 1),
        "codec.bits": bits,
        "exchange.error_feedback": True,
        # The simulator does not foresee what adapts.
        "adaptive.mode": "off",
      }
  elif method in _BITS:
    for bits in _BITS[method]:
      yield {"codec.name": "int", "codec.bits": bits}
  elif method == "streaming_diloco":
    yield from ({"codec.name": name} for name in ("float32", "e3m0"))
  else:
    yield {}


def _schedules(method: str) -> Iterator[Changes]:
  if method != "streaming_diloco":
    yield {}
    return
  for fragments, overlap in itertools.product(_FRAGMENTS, _OVERLAPS):
    yield {"sync.num_fragments": fragments, "sync.overlap_steps": overlap}


def at_interval(changes: Changes, interval: int) -> Changes:
  """Returns a family's settings with an H.

  Args:
    changes: Settings without H.
    interval: H (inner steps).
  """
  method = changes["sync.method"]
  settings = changes | {"sync.sync_interval": interval}
  if method == "overlap_loco":
    settings["sync.num_fragments"] = min(_SLICES, interval)
  # The gap that is expected was measured with them.
  codec = changes.get("codec.name", "")
  return settings | tuned_outer(method, codec, interval)


def layouts(config: RunConfig, num_devices: int) -> Iterator[Changes]:
  """Yields the ways to divide a replica among its devices.

  Stages compute everything again in the backward pass, as models that need
  stages do.

  Args:
    config: Config whose model and batch are divided.
    num_devices: Devices of one replica.
  """
  if num_devices == 1:
    yield {}
    return
  batch = config.data.batch_size
  for stages in range(1, num_devices + 1):
    shards = num_devices // stages
    if num_devices % stages or batch % shards:
      continue
    for count in range(batch // shards + 1):
      micro_batches = 2**count
      if batch // shards % micro_batches:
        break
      remat = {"mesh.remat": "full"} if stages > 1 else {}
      yield remat | {
        "mesh.layout": "mesh",
        "mesh.num_stages": stages,
        "mesh.num_data_shards": shards,
        "inner.accumulate_steps": micro_batches,
      }


def changed(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig | None:
  """Returns the config with changes; None if they do not go together.

  Args:
    config: Config whose model, data and optimizer's settings stay.
    changes: Values by dotted names.
  """
  values = config.to_mapping() | {section: {} for section in _OF_METHOD}
  values["inner"] |= {"optimizer": None, "momentum": 0.0}
  for path, value in changes.items():
    section, field = path.split(".")
    values[section][field] = value
  try:
    return from_mapping(values)
  except ValueError:
    return None
