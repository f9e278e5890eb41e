"""Which layers every stage computes.

The model's layers are cut into parts of neighbouring layers, as even as
possible, the longer ones first: the last stage also has the head. Part k of
the model is chunk k // S of stage k mod S, as in `plan.pipeline`.
"""

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class StageLayers:
  """The layers of a model by stage and chunk.

  Attributes:
    num_layers: Layers of the model.
    num_stages: S.
    chunks_per_stage: v.
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
    """Layers [S, v, K] int32; where a part is short, `num_layers` fills it."""
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
    """Layers of every stage's chunks."""
    is_layer = self.table < self.num_layers
    return tuple(tuple(map(int, row)) for row in is_layer.sum(axis=2))

  @property
  def places(self) -> np.ndarray:
    """Where each layer stands in the flattened table, [num_layers] int32."""
    flat = self.table.reshape(-1)
    return np.argsort(flat, kind="stable")[: self.num_layers].astype(np.int32)

  @property
  def is_in_order(self) -> bool:
    """Whether stages hold equal stretches of layers, one after the other."""
    flat = self.table.reshape(-1)
    return np.array_equal(flat, np.arange(self.num_layers))
