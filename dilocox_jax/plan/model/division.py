"""Divides a replica's arrays among its devices.

A replica may be spread over data shards, pipeline stages and tensor shards.
Parameters and arrays like them (optimizer states, residuals, pseudo-gradients
in flight) are divided in the same way. For this package's decoders, the table
`_RULES` says how, by the path of a leaf. The leaves of a user's model are
divided as the user says, or along their largest dimension that the number of
data shards divides.

For example, with 2 data shards and 2 stages a kernel of 4 layers [4, 128, 344]
is divided into [2, 64, 344] on each of the 4 devices: layers by stage, rows by
data shard. If a stage does not keep the layers that it computes, all 4 devices
divide the rows, so each device holds [4, 32, 344].
"""

import dataclasses
import functools
import math
import re

import numpy as np

from dilocox_jax.checks import check_limits, limited, require
from dilocox_jax.plan.model.shapes import ModelShape

# A `Spec` has one entry for each dimension of an array: the names of the mesh
# axes that divide this dimension, outermost first.
Spec = tuple[tuple[str, ...], ...]

DATA_AXIS = "data"
STAGE_AXIS = "stage"
TENSOR_AXIS = "tensor"
_DATA = (DATA_AXIS,)
_STAGE = (STAGE_AXIS,)
_TENSOR = (TENSOR_AXIS,)
_WHOLE = ()
_ALL = (DATA_AXIS, STAGE_AXIS)
# All devices of a replica. The devices of a stage have neighboring parts.
_ALL_BY_STAGE = (STAGE_AXIS, DATA_AXIS, TENSOR_AXIS)

# Vectors with fewer values are not divided (`Division.largest_dimension_spec`).
# The time to collect their parts would cost more than the memory they take.
_SMALLEST_DIVIDED_VECTOR = 65_536
# In arrays of this many dimensions or more, the first one may count layers.
_NUM_DIMENSIONS_OF_STACK = 3

# Specs of the last dimensions of a leaf, the best one first. `Division` takes
# the first spec for which all sizes are divisible. If there is none, every
# device keeps the whole leaf. Specs that begin with `_STAGE` divide the layers
# among the stages. They are skipped if `Division.layers_on_stages` is False.
_MATRICES = (
  (_STAGE, _DATA, _WHOLE),
  (_STAGE, _WHOLE, _DATA),
  (_WHOLE, _ALL, _WHOLE),
  (_WHOLE, _WHOLE, _ALL),
  (_WHOLE, _STAGE, _DATA),
  (_WHOLE, _DATA, _STAGE),
  (_WHOLE, _STAGE, _WHOLE),
  (_WHOLE, _WHOLE, _STAGE),
  (_WHOLE, _DATA, _WHOLE),
  (_WHOLE, _WHOLE, _DATA),
)
# Tensor shards divide the outputs of a layer's first matrices, and the inputs
# of its last ones. So a layer sums over the tensor shards twice: after its
# attention and after its feed-forward.
# Source: Shoeybi et al. 2019, arXiv 1909.08053, section 3.
_TO_TENSOR_SHARDS = (
  (_STAGE, _DATA, _TENSOR),
  (_WHOLE, _ALL, _TENSOR),
  (_STAGE, _WHOLE, _TENSOR),
  (_WHOLE, _STAGE, _TENSOR),
  (_WHOLE, _DATA, _TENSOR),
  (_WHOLE, _WHOLE, _TENSOR),
  *_MATRICES,
)
_FROM_TENSOR_SHARDS = (
  (_STAGE, _TENSOR, _DATA),
  (_WHOLE, _TENSOR, _ALL),
  (_STAGE, _TENSOR, _WHOLE),
  (_WHOLE, _TENSOR, _STAGE),
  (_WHOLE, _TENSOR, _DATA),
  (_WHOLE, _TENSOR, _WHOLE),
  *_MATRICES,
)
# A table has a row or a column for every token of the vocabulary. Data shards
# divide the tokens if their number is divisible (`Division.divided_tables`).
_TABLE = (
  ((*_ALL, TENSOR_AXIS), _WHOLE),
  (_ALL, _WHOLE),
  (_DATA, _STAGE),
  (_WHOLE, _ALL),
  (_STAGE, _DATA),
  (_STAGE, _WHOLE),
  (_WHOLE, _STAGE),
  (_DATA, _WHOLE),
  (_WHOLE, _DATA),
)
_VECTORS = ((_STAGE, _WHOLE),)
_TENSOR_VECTORS = ((_STAGE, _TENSOR), (_WHOLE, _TENSOR), *_VECTORS)
_LOW_RANK_TABLE = ((_WHOLE, _ALL, _WHOLE), (_WHOLE, _DATA, _WHOLE))

_FIRST = r"(^|/)blocks/.*/(query|key|value|gate|up)"
_LAST = r"(^|/)blocks/.*/(output|down)"

# Each line has a pattern of leaf paths, and the specs of such a leaf. The last
# two lines are for leaves with names that a user's model has chosen.
_RULES: tuple[tuple[str, tuple[Spec, ...]], ...] = (
  (_FIRST + r"/kernel$", _TO_TENSOR_SHARDS),
  (_FIRST + r"/bias$", _TENSOR_VECTORS),
  (_LAST + r"/kernel$", _FROM_TENSOR_SHARDS),
  (r"(^|/)blocks/.*/kernel(/right)?$", _MATRICES),
  (r"(^|/)blocks/.*/(scale|bias)$", _VECTORS),
  (r"(^|/)embed/(embedding|positions)$", _TABLE),
  (r"(^|/)head/kernel$", tuple(spec[::-1] for spec in _TABLE)),
  (r"(^|/)(embed/(embedding|positions)|head/kernel)/right$", _LOW_RANK_TABLE),
  (r"(^|/)blocks/", (*_MATRICES, *_VECTORS)),
  (r"", _TABLE),
)

# Leaves with a row or column for every token of the vocabulary, and the number
# of the dimension that counts the tokens.
_TOKEN_DIMENSIONS = {"embed/embedding": 0, "head/kernel": 1}


@dataclasses.dataclass(frozen=True)
class Division:
  """The division of a replica's arrays among its devices.

  A "spec" has an entry for each dimension of an array: the names of the mesh
  axes ("data", "stage", "tensor") that divide this dimension.

  Attributes:
    num_data_shards: Number of parts into which a batch is divided. The devices
      that read different parts are data shards. They also divide the replica's
      arrays, where the sizes allow.
    num_stages: Number of pipeline stages.
    layers_on_stages: Whether a stage keeps the layers that it computes. If not,
      the devices of all stages divide each layer.
    num_tensor_shards: Number of devices that share the matrix products of a
      layer. All of them read the same rows of a batch.
    leaf_specs: Path and spec of every parameter of a user's model. None: the
      model is a decoder of this package, and its specs follow from the names of
      its leaves.
  """

  num_data_shards: int = limited(1, at_least=1)
  num_stages: int = limited(1, at_least=1)
  layers_on_stages: bool = True
  num_tensor_shards: int = limited(1, at_least=1)
  leaf_specs: tuple[tuple[str, Spec], ...] | None = None

  def __post_init__(self):
    """Raises ValueError if a field is outside its limits."""
    check_limits(self)

  @property
  def num_devices(self) -> int:
    """Number of devices of one replica."""
    return self.num_data_shards * self.num_stages * self.num_tensor_shards

  @property
  def sizes(self) -> dict[str, int]:
    """Number of shards along the mesh axes "data", "stage" and "tensor".

    The mesh has the axes in this order, outermost first.
    """
    return {
      DATA_AXIS: self.num_data_shards,
      STAGE_AXIS: self.num_stages,
      TENSOR_AXIS: self.num_tensor_shards,
    }

  def spec(self, path: str, shape: tuple[int, ...]) -> Spec:
    """Returns the mesh axes that divide each dimension of a leaf.

    The leaf is a parameter, or an array that belongs to a parameter, such as an
    optimizer's moment.

    Args:
      path: Keys of the leaf, joined by "/". Other keys may stand in front of
        the parameter's keys, such as the name of a moment.
      shape: Shape of the leaf in one replica. Other dimensions may stand in
        front of the parameter's dimensions.

    Returns:
      One entry for each dimension of `shape`: the names of the mesh axes that
      divide it, () if none does.
    """
    if self.leaf_specs is not None:
      return self._spec_like_parameter(path, shape)
    for pattern, specs in _RULES:
      if re.search(pattern, path):
        return self._first_even(specs, shape)
    raise AssertionError("the last pattern matches every path")

  @functools.cached_property
  def _specs_by_path(self) -> dict[str, Spec]:
    """`leaf_specs` as a dict by path; {} if there are none."""
    return dict(self.leaf_specs or ())

  def _spec_like_parameter(self, path: str, shape: tuple[int, ...]) -> Spec:
    """Returns the mesh axes that divide a leaf of a user's model (its spec).

    Example: the moment "inner/0/mu/up/kernel" has the spec of "up/kernel". If
    no parameter fits, or its spec divides the leaf unevenly,
    `largest_dimension_spec` gives the spec.
    """
    keys = path.split("/")
    # The path may have other keys in front of the parameter's keys.
    for first in range(len(keys)):
      parameter_spec = self._specs_by_path.get("/".join(keys[first:]))
      if parameter_spec is None:
        continue
      num_leading = len(shape) - len(parameter_spec)
      spec = (_WHOLE,) * num_leading + parameter_spec
      if num_leading >= 0 and self.divides(spec, shape):
        return spec
    return self.largest_dimension_spec(shape)

  def largest_dimension_spec(self, shape: tuple[int, ...]) -> Spec:
    """Returns a spec that divides the largest dimension among all data shards.

    The largest dimension that the number of data shards divides evenly is
    taken. Example: with 4 data shards, [6, 64, 256] is divided along its last
    dimension, and [6, 64, 250] along its second one. Exceptions:

    - If an array has three or more dimensions, the first one is divided only if
      no other can be, because it may count layers.
    - A vector is divided only if it has 65,536 values or more.
    - If no dimension is divisible, every device keeps the whole leaf.

    Args:
      shape: Shape of the leaf in one replica.

    Returns:
      One entry for each dimension: ("data",) for the divided one, () for the
      others.
    """
    whole = (_WHOLE,) * len(shape)
    if len(shape) <= 1 and math.prod(shape) < _SMALLEST_DIVIDED_VECTOR:
      return whole
    dimensions = list(range(len(shape)))
    # Of equal sizes the last one comes first.
    dimensions.sort(key=lambda dimension: (shape[dimension], dimension))
    dimensions.reverse()
    if len(shape) >= _NUM_DIMENSIONS_OF_STACK:
      dimensions.remove(0)
      dimensions.append(0)
    for dimension in dimensions:
      size = shape[dimension]
      if size > 0 and size % self.num_data_shards == 0:
        return (*whole[:dimension], _DATA, *whole[dimension + 1 :])
    return whole

  def _first_even(
    self, specs: tuple[Spec, ...], shape: tuple[int, ...]
  ) -> Spec:
    """Returns the first of some specs that divides a shape evenly.

    Specs that name tensor shards are skipped if there is only one tensor shard.
    Specs that begin with the stages are skipped if `layers_on_stages` is False.
    If no other spec divides the shape evenly, no dimension is divided.
    """
    for spec in specs:
      has_layers_on_stages = bool(spec) and spec[0] == _STAGE
      if has_layers_on_stages and not self.layers_on_stages:
        continue
      names_tensor_shards = any(TENSOR_AXIS in axes for axes in spec)
      if names_tensor_shards and self.num_tensor_shards == 1:
        continue
      num_leading = len(shape) - len(spec)
      whole_spec = (_WHOLE,) * num_leading + spec
      if num_leading >= 0 and self.divides(whole_spec, shape):
        return whole_spec
    return (_WHOLE,) * len(shape)

  def divided_tables(self, shape: ModelShape) -> frozenset[str]:
    """Returns the tables of the vocabulary that data shards divide by token.

    Each data shard then has the rows of the embedding, or the columns of the
    head, of some tokens of the vocabulary, and no device needs the whole table.

    Args:
      shape: Sizes of the model.

    Returns:
      Paths of the tables that are divided in this way: "embed/embedding",
      "head/kernel", both or none.
    """
    if self.num_data_shards == 1:
      return frozenset()
    leaves = shape.parameter_shapes
    paths = set()
    for path, dimension in _TOKEN_DIMENSIONS.items():
      if path in leaves:
        axes = self.spec(path, leaves[path])[dimension]
        if DATA_AXIS in axes:
          paths.add(path)
    return frozenset(paths)

  def divides(self, spec: Spec, shape: tuple[int, ...]) -> bool:
    """Returns whether the mesh axes of a spec divide each dimension evenly."""
    pairs = zip(spec, shape, strict=True)
    return all(size % self.num_shards(axes) == 0 for axes, size in pairs)

  def num_shards(self, axes: tuple[str, ...]) -> int:
    """Returns into how many parts some mesh axes divide a dimension."""
    return math.prod(self.sizes[axis] for axis in axes)

  def share_size(self, path: str, shape: tuple[int, ...]) -> int:
    """Returns how many values of a leaf a device holds."""
    return math.prod(
      size // self.num_shards(axes)
      for size, axes in zip(shape, self.spec(path, shape), strict=True)
    )

  def flat_spec(self, shape: tuple[int, ...]) -> Spec | None:
    """Returns a spec that divides an array evenly among a replica's devices.

    The first of these divisions for which all sizes are divisible is taken:

    1. Stages divide the layers, data shards the second dimension and tensor
       shards the third.
    2. Stages divide the layers, and data shards and tensor shards together
       divide the second dimension.
    3. All devices together divide one dimension, the first possible one.

    Args:
      shape: Shape of an array whose first dimension counts layers.

    Returns:
      The mesh axes of each dimension, or None if none of these divisions is
      possible.
    """
    others = (_WHOLE,) * (len(shape) - 1)  # All dimensions but one.
    specs: list[Spec] = []
    if len(others) > 1:
      specs.append((_STAGE, _DATA, _TENSOR, *others[2:]))
    if others:
      specs.append((_STAGE, (DATA_AXIS, TENSOR_AXIS), *others[1:]))
    for dimension in range(len(shape)):
      specs.append((*others[:dimension], _ALL_BY_STAGE, *others[dimension:]))
    for spec in specs:
      if self.divides(spec, shape):
        return spec
    return None


@dataclasses.dataclass(frozen=True)
class StageLayers:
  """Says which layers each pipeline stage computes.

  A stage computes neighboring layers. The numbers of layers are as equal as
  possible, and stages with one more layer come first. For example, of five
  layers and two stages, the first stage computes the layers 0, 1 and 2, and the
  second stage the layers 3 and 4.

  Attributes:
    num_layers: Number of layers of the model.
    num_stages: Number of pipeline stages, S.

  Raises:
    ValueError: If there are more stages than layers.
  """

  num_layers: int
  num_stages: int

  def __post_init__(self):
    """Raises ValueError if there are more stages than layers."""
    require(
      self.num_stages <= self.num_layers,
      f"num_layers={self.num_layers} cannot be cut into num_stages="
      f"{self.num_stages} parts: take fewer stages",
    )

  @functools.cached_property
  def table(self) -> np.ndarray:
    """Indices of the layers of each stage, [S, K] int32.

    K is the number of layers of the longest stage. In a shorter stage the last
    entry is `num_layers`, which is no layer. For example, five layers and two
    stages have the table [[0, 1, 2], [3, 4, 5]].
    """
    parts = np.array_split(np.arange(self.num_layers), self.num_stages)
    table = np.full((len(parts), len(parts[0])), self.num_layers, np.int32)
    for row, layers in zip(table, parts, strict=True):
      row[: len(layers)] = layers
    return table

  @property
  def counts(self) -> np.ndarray:
    """Number of layers of each stage, [S] int32."""
    is_layer = self.table < self.num_layers
    return is_layer.astype(np.int32).sum(axis=1, dtype=np.int32)

  @property
  def rows(self) -> np.ndarray:
    """Index of each layer in the flattened `table`, [num_layers] int32.

    For example, the table [[0, 1], [2, 4], [3, 4]] of four layers and three
    stages gives 0, 1, 2 and 4.
    """
    return np.flatnonzero(self.table < self.num_layers).astype(np.int32)

  @property
  def is_even(self) -> bool:
    """Whether all stages have equally many layers."""
    return self.num_layers % self.num_stages == 0
