"""Reads and writes checkpoints of OPT, Llama and Qwen, as `transformers` does.

A checkpoint is a folder with a `config.json` and one or more `.safetensors`
files. Only reading needs the extra `weights` (`pip install
'dilocox_jax[weights]'`).
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dilocox_jax import files
from dilocox_jax.checks import json_file, require, shown
from dilocox_jax.models import families
from dilocox_jax.models.tensor_files import (
  INDEX_FILE,
  StoredTensor,
  TensorShape,
  check_no_other_checkpoint,
  divided_among_files,
  open_tensors,
  write_index,
  write_tensors,
)
from dilocox_jax.plan.model.shapes import ModelShape
from dilocox_jax.trees import LazyArray, leaves_by_path, nested

CONFIG_FILE = "config.json"
# Bytes of tensors in a file that is written. Libraries read several files at
# the same time, and a download that breaks off is repeated file by file.
MAX_FILE_BYTES = 5 * 10**9


def is_checkpoint(folder: pathlib.Path) -> bool:
  """Returns whether a folder has a config.json with the key "model_type".

  The key names a family of models, maybe one that this module cannot read.

  Raises:
    ValueError: One line, if config.json is there but cannot be read.
  """
  path = folder / CONFIG_FILE
  return path.exists() and "model_type" in json_file(path)


@dataclasses.dataclass(frozen=True)
class StoredCheckpoint:
  """A checkpoint whose parameters are read part by part.

  Attributes:
    shape: Sizes of the model.
    family_name: Name of the family, one of `families.FAMILIES`.
    tensors: The tensors by name. `open_checkpoint` has checked that they fit
      the model.
  """

  shape: ModelShape
  family_name: str
  tensors: Mapping[str, StoredTensor]

  def params(self) -> dict[str, Any]:
    """Returns the parameters as a nested dict of `StoredLeaf`, not yet read."""
    leaves = {
      path: StoredLeaf(self, path) for path in self.shape.parameter_shapes
    }
    return nested(leaves)

  def part(self, path: str, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a part of a parameter, in fp32, a few rows of the file at a time.

    Args:
      path: Path of the parameter, e.g. "blocks/mlp/up/kernel".
      index: Slice of every axis, with steps of 1.

    Raises:
      ValueError: One line, if a value of the part is not finite, or if the part
        belongs to the embedding and differs from the checkpoint's tied head.
    """
    leaf_shape = self.shape.parameter_shapes[path]
    ranges = [
      range(*axis_slice.indices(size))
      for axis_slice, size in zip(index, leaf_shape, strict=True)
    ]
    # `index` may have None or negative bounds. The bounds of `slices` are
    # numbers from 0.
    slices = [slice(axis.start, axis.stop) for axis in ranges]
    part = np.empty([len(axis) for axis in ranges], np.float32)
    if not families.is_stacked(path):
      self._read(path, 0, slices, part)
      return part
    for layer, layer_part in zip(ranges[0], part, strict=True):
      self._read(path, layer, slices[1:], layer_part)
    return part

  def _read(
    self, path: str, layer: int, slices: list[slice], part: np.ndarray
  ) -> None:
    """Reads a part of one tensor into the array `part`.

    `slices` select the part, without the layer axis. `layer` is 0 if the
    parameter has no such axis.
    """
    family = families.FAMILIES[self.family_name]
    name = families.tensor_name(path, layer, family)
    if families.is_kernel(path):
      # Checkpoints have kernels [outputs, inputs], and the built-in decoder has
      # kernels [inputs, outputs].
      slices = slices[::-1]
      part = part.T  # A view, so values are written into the caller's array.
    rows, *columns = slices
    if path == families.POSITIONS:
      offset = family.first_position
      rows = slice(rows.start + offset, rows.stop + offset)
    for block_rows, values in self.tensors[name].blocks(rows):
      part[block_rows] = _finite_values(name, values[:, *columns])
    if path == "embed/embedding" and self.shape.tied_head:
      self._check_head(rows, columns, part)

  def _check_head(
    self, rows: slice, columns: list[slice], embedding: np.ndarray
  ) -> None:
    """Raises ValueError if a tied head differs from the embedding.

    Only the given rows and columns are compared. A checkpoint without a head
    passes.
    """
    if families.HEAD_TENSOR not in self.tensors:
      return
    for block_rows, values in self.tensors[families.HEAD_TENSOR].blocks(rows):
      head = _finite_values(families.HEAD_TENSOR, values[:, *columns])
      require(
        np.array_equal(head, embedding[block_rows]),
        "config.json says that head and embedding are one, but "
        f"{families.HEAD_TENSOR} is not the embedding: copy both again",
      )


@dataclasses.dataclass(frozen=True)
class StoredLeaf(LazyArray):
  """A parameter of a checkpoint that is still in the file."""

  checkpoint: StoredCheckpoint
  path: str

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the parameter."""
    return self.checkpoint.shape.parameter_shapes[self.path]

  @property
  def dtype(self) -> np.dtype:
    """Type of the values when they are read."""
    return np.dtype(np.float32)

  def part(self, index: tuple[slice, ...]) -> np.ndarray:
    """Reads a part of the parameter, in fp32 (`StoredCheckpoint.part`)."""
    return self.checkpoint.part(self.path, index)


def open_checkpoint(folder: pathlib.Path) -> StoredCheckpoint:
  """Opens a checkpoint, and checks that its tensors fit its model.

  Raises:
    ValueError: One line, if a file is missing or damaged, if the built-in
      decoder cannot compute the model, if the extra `weights` is not installed,
      or if a tensor is missing, has another shape, has no floats, or belongs to
      no parameter.
  """
  config = json_file(folder / CONFIG_FILE)
  shape = families.shape_of(config)
  family_name = config["model_type"]
  tensors = open_tensors(folder)
  _check_tensors(tensors, shape, family_name)
  return StoredCheckpoint(shape, family_name, tensors)


def read_checkpoint(folder: pathlib.Path) -> tuple[ModelShape, dict[str, Any]]:
  """Reads a whole checkpoint into the memory of the host.

  Returns:
    Sizes of the model, and its parameters as a nested dict of fp32 arrays.

  Raises:
    ValueError: One line, for the reasons of `open_checkpoint`, if a value is
      not finite, or if a tied head differs from the embedding.
  """
  checkpoint = open_checkpoint(folder)
  return checkpoint.shape, jax.tree.map(np.asarray, checkpoint.params())


def write_checkpoint(
  folder: pathlib.Path,
  shape: ModelShape,
  params: Any,
  max_file_bytes: int = MAX_FILE_BYTES,
) -> str:
  """Writes a checkpoint for `transformers`, tensor by tensor.

  Args:
    folder: Folder to write into, which must exist. It may have a checkpoint of
      an earlier call, whose files are replaced. If one of these files has
      another name than the new files, the folder is refused.
    shape: Sizes of the model.
    params: Parameters of the model, a nested dict. `np.asarray` is called on
      each leaf only when it is written.
    max_file_bytes: Largest number of bytes of tensors in a file. A larger model
      is divided among several files, with an index.

  Returns:
    Name of the family, one of `families.FAMILIES`.

  Raises:
    ValueError: One line, if no family has a model of this shape, if the folder
      has files of another checkpoint, if its config.json belongs to another
      program, or if `max_file_bytes` is less than 1.
  """
  require(
    max_file_bytes >= 1,
    f"max_file_bytes={max_file_bytes} must be at least 1: take a number such "
    f"as {MAX_FILE_BYTES}",
  )
  family_name = families.family_of(shape)
  tensors_by_file = divided_among_files(
    _tensor_shapes(shape, family_name), max_file_bytes
  )
  file_names = {CONFIG_FILE, *tensors_by_file}
  has_index = len(tensors_by_file) > 1
  if has_index:
    file_names.add(INDEX_FILE)
  check_no_other_checkpoint(folder, file_names)
  config_path = folder / CONFIG_FILE
  _check_replaceable(config_path)
  # A folder without config.json is no checkpoint. So the old config is removed
  # first, and the new one is written last. A program that is killed in between
  # cannot leave the config of one model beside the tensors of another.
  config_path.unlink(missing_ok=True)
  values = tensors_of(params, shape, family_name)
  for file_name, tensors in tensors_by_file.items():
    write_tensors(folder / file_name, tensors, values)
  if has_index:
    write_index(folder, tensors_by_file)
  save_json(config_path, families.config_of(shape, family_name))
  return family_name


def _check_replaceable(config_path: pathlib.Path) -> None:
  """Raises ValueError if config.json exists and is not that of a checkpoint."""
  # Runs of this package and other programs keep their settings in such a file.
  if not config_path.exists():
    return
  try:
    belongs_to_checkpoint = "model_type" in json_file(config_path)
  except ValueError:
    belongs_to_checkpoint = False
  require(
    belongs_to_checkpoint,
    f"{config_path} is not the config of a checkpoint, and would be replaced: "
    "take an empty folder",
  )


def save_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
  """Writes values as JSON, and replaces the file as a whole."""
  with files.replaced(path) as file:
    file.write(json.dumps(values, indent=2).encode() + b"\n")


def _check_tensors(
  tensors: Mapping[str, StoredTensor], shape: ModelShape, family_name: str
) -> None:
  """Raises ValueError unless a checkpoint has exactly the tensors of a model.

  Two more kinds of tensors may be there: the frequencies of rotary positions,
  which are not read, and a head although it is tied to the embedding.
  """
  family = families.FAMILIES[family_name]
  unread = {
    key for key in tensors if not key.endswith(families.FREQUENCIES_SUFFIX)
  }
  for path, leaf_shape in shape.parameter_shapes.items():
    tensor_shape = families.tensor_shape(path, leaf_shape, family)
    for key in families.tensor_names(path, shape, family):
      require(
        key in tensors, f"the checkpoint is no {family_name}: it lacks {key}"
      )
      unread.discard(key)
      _check_tensor(key, tensors[key], tensor_shape)
  if shape.tied_head and families.HEAD_TENSOR in unread:
    embedding_shape = shape.parameter_shapes["embed/embedding"]
    _check_tensor(
      families.HEAD_TENSOR, tensors[families.HEAD_TENSOR], embedding_shape
    )
    unread.discard(families.HEAD_TENSOR)
  unknown = min(unread, default="")
  require(
    not unread,
    f"the checkpoint is no {family_name}: what is {shown(unknown)}?",
  )


def _check_tensor(
  key: str, tensor: StoredTensor, expected_shape: tuple[int, ...]
) -> None:
  """Raises ValueError unless a tensor has the expected shape and has floats."""
  require(
    tensor.shape == expected_shape,
    f"the tensor {key} has the shape {tensor.shape}, but by its config.json "
    f"{expected_shape}",
  )
  require(
    jnp.issubdtype(tensor.dtype, jnp.floating),
    f"the tensor {key} has the type {tensor.dtype}, and not that of a weight: "
    "convert the checkpoint to floats",
  )


def _finite_values(key: str, values: np.ndarray) -> np.ndarray:
  """Converts values to fp32; raises ValueError if one is not finite."""
  # A value of fp64 may be too large for fp32. numpy would warn about it and
  # make it infinite. The check below refuses it anyway.
  with np.errstate(over="ignore"):
    wide_values = np.asarray(values, np.float32)
  require(
    bool(np.isfinite(wide_values).all()),
    f"the tensor {key} has values that are not finite: the checkpoint is "
    "damaged; copy it again",
  )
  return wide_values


def tensors_of(
  params: Any, shape: ModelShape, family_name: str
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields name and fp32 values of each tensor of a checkpoint, one at a time.

  Args:
    params: Parameters of the model, a nested dict. `np.asarray` is called on
      each leaf only when its tensors are yielded.
    shape: Sizes of the model.
    family_name: Name of the family, one of `families.FAMILIES`.
  """
  return families.tensors_of(leaves_by_path(params), shape, family_name)


def _tensor_shapes(
  shape: ModelShape, family_name: str
) -> Iterator[TensorShape]:
  """Yields the `TensorShape` of each tensor, in the order of `tensors_of`."""
  family = families.FAMILIES[family_name]
  for path, leaf_shape in shape.parameter_shapes.items():
    tensor_shape = families.tensor_shape(path, leaf_shape, family)
    for name in families.tensor_names(path, shape, family):
      yield TensorShape(name, np.dtype(np.float32), tensor_shape)
