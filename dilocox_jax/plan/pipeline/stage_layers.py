"""The layers that each pipeline stage computes.

The model's layers are cut into S v runs of neighbouring layers, as even as
possible. The longer ones come first, because the last stage also has the head.
Run k of layers is chunk k // S of stage k mod S, as in `plan.pipeline`.
Five layers on S = 2 stages with v = 2 chunks are cut into 0-1, 2, 3 and 4:
stage 0 has chunks (0, 1) and (3), stage 1 has (2) and (4).
"""

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class StageLayers:
  """Assigns the layers of a model to stages and chunks.

  Attributes:
    num_layers: Layers of the model.
    num_stages: Number of pipeline stages, S.
    chunks_per_stage: Number of chunks of a stage, v.
  """

  num_layers: int
  num_stages: int
  chunks_per_stage: int = 1

  def __post_init__(self):
    count = self.num_stages * self.chunks_per_stage
    if count > self.num_layers:
      raise ValueError(
        f"num_layers={self.num_layers} cannot be cut into {count} parts "
        f"(num_stages={self.num_stages}, "
        f"chunks_per_stage={self.chunks_per_stage})"
      )

  @functools.cached_property
  def table(self) -> np.ndarray:
    """Layer indices [S, v, K] int32; `num_layers` fills short chunks."""
    count = self.num_stages * self.chunks_per_stage
    parts = np.array_split(np.arange(self.num_layers), count)
    shape = (self.num_stages, self.chunks_per_stage, len(parts[0]))
    table = np.full(shape, self.num_layers, np.int32)
    for number, layers in enumerate(parts):
      chunk, stage = divmod(number, self.num_stages)
      table[stage, chunk, : len(layers)] = layers
    return table

  @property
  def counts(self) -> tuple[tuple[int, ...], ...]:
    """Number of layers of each chunk, one tuple for each stage."""
    is_layer = self.table < self.num_layers
    return tuple(tuple(map(int, row)) for row in is_layer.sum(axis=2))

  @property
  def places(self) -> np.ndarray:
    """Place of each layer in the flattened table, [num_layers] int32."""
    flat = self.table.reshape(-1)
    return np.argsort(flat, kind="stable")[: self.num_layers].astype(np.int32)

  @property
  def is_in_order(self) -> bool:
    """Whether stages hold equally many neighbouring layers, in order."""
    flat = self.table.reshape(-1)
    return np.array_equal(flat, np.arange(self.num_layers))
