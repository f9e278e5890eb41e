"""Says which layers each pipeline stage computes.

The model's layers are cut into S v parts of neighbouring layers, with S stages
and v chunks per stage. The parts are as equal as possible. Longer parts come
first, because the last stage also computes the head. Part k is chunk k // S of
stage k mod S, as in `plan.pipeline`.

For example five layers with S = 2 and v = 2 are cut into 0-1, 2, 3 and 4.
Stage 0 has the chunks (0, 1) and (3), and stage 1 has the chunks (2) and (4).
"""

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class StageLayers:
  """Assigns the layers of a model to stages and chunks.

  Attributes:
    num_layers: Number of layers of the model.
    num_stages: Number of pipeline stages, S.
    chunks_per_stage: Number of chunks of each stage, v.
  """

  num_layers: int
  num_stages: int
  chunks_per_stage: int = 1

  def __post_init__(self):
    count = self.num_stages * self.chunks_per_stage
    if count > self.num_layers:
      raise ValueError(
        f"num_layers={self.num_layers} cannot be cut into {count} parts "
        f"(num_stages={self.num_stages} * "
        f"chunks_per_stage={self.chunks_per_stage}): take fewer parts"
      )

  @functools.cached_property
  def table(self) -> np.ndarray:
    """Indices of the layers of each stage and chunk, [S, v, K] int32.

    K is the number of layers of the longest chunk. In a shorter chunk the last
    entries are `num_layers`, which is no layer. The example of this file has
    K = 2 and the table [[[0, 1], [3, 5]], [[2, 5], [4, 5]]].
    """
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
    """Position of each layer in the flattened table, [num_layers] int32."""
    flat = self.table.reshape(-1)
    return np.argsort(flat, kind="stable")[: self.num_layers].astype(np.int32)

  @property
  def is_in_order(self) -> bool:
    """Whether the flattened table is 0, 1, ... num_layers - 1.

    All stages then hold equally many neighbouring layers, in order.
    """
    flat = self.table.reshape(-1)
    return np.array_equal(flat, np.arange(self.num_layers))
