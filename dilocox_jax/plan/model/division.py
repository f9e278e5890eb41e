"""Which device of a replica keeps which part of every array.

A replica may be spread over data shards and pipeline stages. Parameters, both
optimizers' states, residuals and everything in flight are divided alike, so
that a device holds its share of each and nothing else. The division is a
table by path, and a leaf that no line of it knows is an error: silently
keeping it whole everywhere could cost more memory than the model.
"""

import dataclasses
import math
import re

# One entry a dimension: the mesh axes that divide it, the first outermost.
Spec = tuple[tuple[str, ...], ...]

DATA_AXIS, STAGE_AXIS = "data", "stage"
_DATA, _STAGE, _WHOLE = (DATA_AXIS,), (STAGE_AXIS,), ()
_ALL = (DATA_AXIS, STAGE_AXIS)
_BY_LAYER = (STAGE_AXIS, DATA_AXIS)

# Ways to divide the last dimensions of a leaf, the best first; the first that
# comes out even is taken. What fits no way is kept whole. Ways that put layers
# on stages come first and are left out where layers are not kept there.
_RULES: tuple[tuple[str, tuple[Spec, ...]], ...] = (
  (
    r"(^|/)blocks/.*/kernel(/right)?$",
    (
      (_STAGE, _DATA, _WHOLE),
      (_STAGE, _WHOLE, _DATA),
      (_WHOLE, _ALL, _WHOLE),
      (_WHOLE, _WHOLE, _ALL),
      (_WHOLE, _STAGE, _DATA),
      (_WHOLE, _DATA, _STAGE),
    ),
  ),
  (r"(^|/)blocks/.*/scale$", ((_STAGE, _WHOLE),)),
  (r"(^|/)blocks/.*/gram$", ((_STAGE, _WHOLE, _WHOLE),)),
  (
    r"(^|/)(embed/embedding|head/kernel)$",
    ((_ALL, _WHOLE), (_WHOLE, _ALL), (_STAGE, _DATA), (_DATA, _STAGE)),
  ),
  (
    r"(^|/)(embed/embedding|head/kernel)/right$",
    ((_WHOLE, _ALL, _WHOLE), (_WHOLE, _DATA, _WHOLE)),
  ),
  (r"(^|/)(embed/embedding|head/kernel)/gram$", ()),
  (r"(^|/)final_norm/scale$", ()),
  # Codes and scales of a residual that is kept in 8 bits, by block.
  (r"/(kernel|embedding|scale)/\d+$", ((_WHOLE, _BY_LAYER, _WHOLE),)),
  (r"(^|/)(count|ns_coeffs)$", ()),  # Of optimizers; a few numbers each.
)


@dataclasses.dataclass(frozen=True)
class Division:
  """How a replica is divided among its devices.

  Attributes:
    num_data_shards: Devices that share a stage; each reads its own part of
      a batch and keeps its part of every array.
    num_stages: Pipeline stages.
    layers_on_stages: Whether a stage keeps the layers that it computes. If
      not - where they do not come out even, or fragments pick layers of all
      stages - every device keeps a part of each layer instead.
  """

  num_data_shards: int = 1
  num_stages: int = 1
  layers_on_stages: bool = True

  def __post_init__(self):
    for name in ("num_data_shards", "num_stages"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

  @property
  def num_devices(self) -> int:
    """Devices of one replica."""
    return self.num_data_shards * self.num_stages

  def spec(self, path: str, shape: tuple[int, ...]) -> Spec:
    """The mesh axes that divide each dimension of a leaf.

    Args:
      path: Keys joined by "/"; what stands before the model's own path, such
        as the name of an optimizer's moment, does not matter.
      shape: One replica's; dimensions in front of the model's are kept whole.

    Raises:
      ValueError: If the table does not know the leaf.
    """
    if not shape:
      return ()
    for pattern, ways in _RULES:
      if re.search(pattern, path):
        return self._first_even(ways, shape)
    raise ValueError(
      f"no rule says how to divide {path} {shape}: add one to plan/shards.py"
    )

  def _first_even(self, ways: tuple[Spec, ...], shape: tuple[int, ...]) -> Spec:
    for way in ways:
      if way[0] == _STAGE and not self.layers_on_stages:
        continue
      lead = len(shape) - len(way)
      spec = (_WHOLE,) * lead + way
      if lead >= 0 and self.divides(spec, shape):
        return spec
    return (_WHOLE,) * len(shape)

  def divides(self, spec: Spec, shape: tuple[int, ...]) -> bool:
    """Whether every dimension comes out even."""
    pairs = zip(spec, shape, strict=True)
    return all(size % self.num_shards(axes) == 0 for axes, size in pairs)

  def num_shards(self, axes: tuple[str, ...]) -> int:
    """Into how many parts some axes divide a dimension."""
    sizes = {DATA_AXIS: self.num_data_shards, STAGE_AXIS: self.num_stages}
    return math.prod(sizes[axis] for axis in axes)

  def flat_spec(self, shape: tuple[int, ...]) -> Spec | None:
    """Divides an array among all devices, wherever it comes out even.

    Args:
      shape: Of an array whose first dimension counts layers.

    Returns:
      None if it does not come out even anywhere.
    """
    rest = (_WHOLE,) * (len(shape) - 1)
    ways = [(_STAGE, _DATA, *rest[1:])] if rest else []
    ways += [
      (*rest[:place], _BY_LAYER, *rest[place:]) for place in range(len(shape))
    ]
    for way in ways:
      if self.divides(way, shape):
        return way
    return None
