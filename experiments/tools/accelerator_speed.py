"""How fast inner steps and codecs are on a device, and what they need.

A figure is a dict that says what was measured, with its goal where one was set
beforehand. Each size of `Sizes` runs on any device, tiny ones in tests.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from dilocox_jax.api.device_memory import device_memory
from dilocox_jax.config import RunConfig, from_mapping
from experiments.tools import bench, bench_inner, bench_programs

Figures = Iterator[dict[str, Any]]
_GOAL_MFU, _GOAL_MEMORY = 0.45, 0.07


@dataclasses.dataclass(frozen=True)
class Sizes:
  """What is measured.

  Attributes:
    models: For each name the sizes of a model of rotary positions, RMS norms
      and SwiGLU, and its batch of sequences.
    length: Tokens of a sequence.
    rounds: Preset, H (inner steps) and batch of the rounds.
    values: Values of each array that codecs work on.
    repeats: Measurements of each figure.
  """

  models: Mapping[str, tuple[Mapping[str, Any], int]]
  length: int
  rounds: tuple[str, int, int]
  values: tuple[int, ...]
  repeats: int


_LLAMA = {"preset": "llama_150m"}
FULL = Sizes(
  {
    "150M": (_LLAMA, 16),
    "300M": (_LLAMA | {"num_layers": 24}, 16),
    "1B": ({"preset": "llama_1_1b"}, 4),
  },
  1024,
  ("llama_150m", 16, 16),
  bench_programs.VALUES,
  5,
)
TINY = Sizes(
  {"tiny": ({"preset": "tiny"}, 2)},
  128,
  ("nano", 4, 2),
  (2, 64, 256),
  3,
)


def _config(sizes: Sizes, name: str) -> RunConfig:
  model, batch = sizes.models[name]
  return from_mapping(
    {
      "model": dict(model),
      "data": {"batch_size": batch, "sequence_length": sizes.length},
      "mesh": {"num_replicas": 1},
      "sync": {"method": "allreduce"},
    }
  )


def inner_steps(sizes: Sizes) -> Figures:
  """Yields tokens a second, utilisation and memory of each model.

  Args:
    sizes: What is measured.
  """
  for name in sizes.models:
    config = _config(sizes, name)
    values = bench_inner.measure_steps(config, sizes.repeats)
    yield {"figure": f"inner step {name}", "goal_mfu": _GOAL_MFU, **values}
    needed = device_memory(config).total
    compiled = (values["argument_bytes"] or 0) + (
      values["temporary_bytes"] or 0
    )
    yield {
      "figure": f"memory {name}",
      "estimated_bytes": needed,
      "compiled_bytes": compiled,
      "estimate_over_compiled": needed / max(compiled, 1),
      "goal_error": _GOAL_MEMORY,
    }
    jax.clear_caches()


def ratios(sizes: Sizes) -> Figures:
  """Yields rounds over their steps, and codecs over a copy of the values.

  Args:
    sizes: What is measured.
  """
  for ratio in (
    *bench_programs.round_ratios(*sizes.rounds),
    *bench_programs.codec_ratios(sizes.values),
  ):
    yield {"figure": ratio.name, **bench.measure_ratio(ratio, sizes.repeats)}
