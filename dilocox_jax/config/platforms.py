"""Fields of a config that follow from the devices, and their values.

The same command should be fast on every device. So a config may leave these
fields open ("auto", or None for a number), and they get values here when the
programs of a run are built. A value that is set explicitly always wins.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dilocox_jax.checks import flat
from dilocox_jax.config.run import RunConfig
from dilocox_jax.plan.choices import SPLASH_LENGTH

_ACCELERATOR: Mapping[str, Any] = {
  "model.attention": "blockwise",
  # Matrix units multiply bfloat16 many times as fast as fp32. Parameters,
  # gradients' sums, norms, softmax and the loss stay in fp32.
  "model.compute_dtype": "bfloat16",
  # Memory is what limits the batch, so only results of products are kept.
  "model.remat": "dots",
  # A program of one layer in a loop compiles fast.
  "model.scan_unroll": 1,
  # [1024, V] keeps the matrix units busy; at V = 32,000 it takes 131 MB.
  "model.loss_chunk_tokens": 1024,
  # Small replicas fill a device only together.
  "mesh.stacked_by": "vmap",
}

# By the names that JAX has for kinds of devices; others have `_ACCELERATOR`.
_VALUES: Mapping[str, Mapping[str, Any]] = {
  "cpu": {
    "model.attention": "plain",
    "model.compute_dtype": "float32",
    "model.remat": "none",
    "model.scan_unroll": 0,
    "model.loss_chunk_tokens": 0,
    # The batched matrix products that vmap makes are slow on CPU.
    "mesh.stacked_by": "map",
  },
  "gpu": {
    **_ACCELERATOR,
    "model.attention": "cudnn",
    # On an H200 layers in a loop copy what they read and save: 24 of them take
    # 84 ms a step unrolled and 94 ms in a loop, and 81 ms if XLA decides what
    # to save, with 14.7 GB of temporaries for 10.5 (measured).
    "model.remat": "none",
    "model.scan_unroll": 0,
    # Computing logits again takes 3 % of a step (measured); at V = 32,000 these
    # take 2.1 GB.
    "model.loss_chunk_tokens": 16384,
  },
  "tpu": {**_ACCELERATOR, "model.attention": "splash"},
}

_OPEN = (None, "auto")  # What leaves a field to the devices.
_CUDNN_WIDTH = 128  # Widest head of every GPU that the kernel knows.


@dataclasses.dataclass(frozen=True)
class Computation:
  """How a replica computes on some kind of devices.

  Its fields are those of the sections `model` and `mesh` that may be left to
  the devices, with values. Those of a model that is handed in stay open.
  """

  attention: str
  compute_dtype: str
  loss_chunk_tokens: int
  remat: str
  scan_unroll: int
  stacked_by: str


def on_platform(
  config: RunConfig, platform: str, has_own_model: bool = False
) -> Computation:
  """Returns how a replica computes, by its config or by `chosen_values`."""
  chosen = chosen_values(config, platform, has_own_model)
  values = flat(config.to_mapping()) | chosen
  return Computation(**{p.partition(".")[2]: values[p] for p in _ACCELERATOR})


def chosen_values(
  config: RunConfig, platform: str, has_own_model: bool = False
) -> dict[str, Any]:
  """Returns the values that a config leaves to the devices, by dotted names.

  Args:
    config: Config of a run.
    platform: Kind of the devices, as `jax.default_backend` names it.
    has_own_model: Whether a model is handed in to the run. It has its own way
      to compute, so fields of `config.model` stay open.
  """
  given, chosen = flat(config.to_mapping()), {}
  for path, value in _VALUES.get(platform, _ACCELERATOR).items():
    is_own = has_own_model and path.startswith("model.")
    # A replica that devices share reads mesh.remat.
    is_unread = path == "model.remat" and config.mesh.is_divided
    if given[path] in _OPEN and not is_own and not is_unread:
      chosen[path] = value
  if attention := chosen.get("model.attention"):
    dtype = (given | chosen)["model.compute_dtype"]
    chosen["model.attention"] = _kernel(config, dtype, attention)
  return chosen


def _kernel(config: RunConfig, dtype: str, attention: str) -> str:
  """Returns the attention, or "blockwise" where its kernel does not fit."""
  width = config.model.shape.head_width
  fits = {
    "cudnn": dtype == "bfloat16"
    and not config.data.document_masks
    and width % 8 == 0
    and width <= _CUDNN_WIDTH,
    "splash": config.data.sequence_length % SPLASH_LENGTH == 0,
  }
  return attention if fits.get(attention, True) else "blockwise"
