"""Reads and writes files of safetensors, the format of `transformers`.

A checkpoint is a folder. One file has all tensors, e.g. `model.safetensors`. Or
several files have them, and `model.safetensors.index.json` names the file of
each tensor:

    {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors", ...}}

A checkpoint may be larger than the memory of a machine. So a reader maps some
rows of a tensor into memory at a time, and a writer holds one tensor at a time.
A file that this module has written contains a digest of its tensors, which is
checked when the file is opened.
"""

import dataclasses
import hashlib
import json
import math
import pathlib
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dilocox_jax import files
from dilocox_jax.checks import extra_package, json_file, json_object, require

TENSORS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SUFFIX = ".safetensors"
# Keys of a file's header and of its metadata.
_METADATA = "__metadata__"
_DIGEST = "sha256"
# The type of numpy for each type of safetensors.
_DTYPES: Mapping[str, Any] = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": jnp.bfloat16,
  "F8_E4M3": jnp.float8_e4m3fn,
  "F8_E5M2": jnp.float8_e5m2,
  "F8_E4M3FNUZ": jnp.float8_e4m3fnuz,
  "F8_E5M2FNUZ": jnp.float8_e5m2fnuz,
  "I64": np.int64,
  "I32": np.int32,
  "I16": np.int16,
  "I8": np.int8,
  "U64": np.uint64,
  "U32": np.uint32,
  "U16": np.uint16,
  "U8": np.uint8,
  "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
# Bytes of a tensor that are mapped into memory at a time. They fit the cache of
# a core, where transposing them is five times faster than in 32 MB.
_BLOCK_BYTES = 2**20
# The header is padded so that the values begin at a multiple of these bytes.
_ALIGNMENT = 8


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor in a file. Its values are not in memory.

  Attributes:
    file: File of safetensors that has the values.
    offset: Byte of the file at which the values begin.
    shape: Shape of the tensor.
    dtype: Type of the values.
  """

  file: pathlib.Path
  offset: int
  shape: tuple[int, ...]
  dtype: np.dtype

  def blocks(
    self, rows: slice = slice(None)
  ) -> Iterator[tuple[slice, np.ndarray]]:
    """Maps some rows of the tensor into memory, block by block.

    A block has at most 1 MiB, but at least one row. A tensor without values has
    no blocks.

    Args:
      rows: Neighboring rows, indices of the first axis. A scalar has one row.

    Yields:
      A pair: the slice of the block's rows, counted from the first row of
      `rows`, and the values of these rows, [block rows, ...].
    """
    num_rows, *row_shape = self.shape or (1,)
    row_bytes = math.prod(row_shape) * self.dtype.itemsize
    if row_bytes == 0:
      return
    first, last, _ = rows.indices(num_rows)
    step = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(first, last, step):
      stop = min(start + step, last)
      content = np.memmap(
        self.file,
        np.uint8,
        "r",
        offset=self.offset + start * row_bytes,
        shape=((stop - start) * row_bytes,),
      )
      values = content.view(self.dtype).reshape(-1, *row_shape)
      yield slice(start - first, stop - first), values


def open_tensors(folder: pathlib.Path) -> dict[str, StoredTensor]:
  """Checks the files of a checkpoint, and returns its tensors by name.

  Raises:
    ValueError: One line, if a file is missing or damaged, if a tensor has a
      type that this module cannot read, if it is not clear which files belong
      to the checkpoint, or if the extra `weights` is not installed.
  """
  weight_map = _weight_map(folder)
  if weight_map is None:
    return _open_file(_only_file(folder))
  file_names = set(weight_map.values())
  by_file = {name: _open_file(folder / name) for name in file_names}
  tensors = {}
  for key, file_name in weight_map.items():
    require(
      key in by_file[file_name],
      f"{folder / INDEX_FILE} says that {file_name} has the tensor {key!r}, "
      "but it has not: copy both again",
    )
    tensors[key] = by_file[file_name][key]
  return tensors


def _weight_map(folder: pathlib.Path) -> dict[str, str] | None:
  """Reads the index: for each tensor's name, the name of the file that has it.

  Returns None if the folder has no index. Raises ValueError if the index is
  damaged, or names other files although `model.safetensors` exists.
  """
  path = folder / INDEX_FILE
  if not path.exists():
    return None
  weight_map = json_file(path).get("weight_map")
  is_map = isinstance(weight_map, dict) and bool(weight_map)
  require(is_map, f"{path} is damaged: it has no weight_map; copy it again")
  assert isinstance(weight_map, dict)
  for name in weight_map.values():
    # A path such as "../x" would lead out of the folder.
    is_name = isinstance(name, str) and pathlib.PurePath(name).name == name
    require(
      is_name and name.endswith(SUFFIX),
      f"{path} is damaged: {name!r} names no {SUFFIX} file of the folder; copy "
      "it again",
    )
  names_only_that_file = set(weight_map.values()) == {TENSORS_FILE}
  require(
    names_only_that_file or not (folder / TENSORS_FILE).exists(),
    f"{folder} has {TENSORS_FILE} and also {INDEX_FILE}, which names other "
    "files: remove the one that an earlier save left",
  )
  return weight_map


def _only_file(folder: pathlib.Path) -> pathlib.Path:
  """Returns the file that has all tensors of a folder without an index.

  It is `model.safetensors` if that exists, else the only .safetensors file.
  Raises ValueError if there is neither.
  """
  if (folder / TENSORS_FILE).exists():
    return folder / TENSORS_FILE
  paths = sorted(folder.glob(f"*{SUFFIX}"))
  require(bool(paths), f"{folder} has no {SUFFIX} file")
  require(
    len(paths) == 1,
    f"{folder} has {len(paths)} {SUFFIX} files and no {INDEX_FILE} that says "
    "which of them belong together: copy it, too",
  )
  return paths[0]


def _open_file(file: pathlib.Path) -> dict[str, StoredTensor]:
  """Checks header and digest of a file, and returns its tensors by name.

  Files of other programs have no digest. Raises ValueError if the file is
  missing or damaged, or if a tensor has a type that is not in `_DTYPES`.
  """
  header, values_offset = _header(file)
  metadata = header.pop(_METADATA, {})
  tensors = {}
  for key, entry in header.items():
    name = entry["dtype"]
    require(
      name in _DTYPES,
      f"{file}: the tensor {key!r} has the type {name}, which cannot be read "
      f"here: convert it to one of {', '.join(_DTYPES)}",
    )
    begin, _ = entry["data_offsets"]
    tensors[key] = StoredTensor(
      file=file,
      offset=values_offset + begin,
      shape=tuple(entry["shape"]),
      dtype=np.dtype(_DTYPES[name]),
    )
  if _DIGEST in metadata:
    digests = {
      key: _tensor_digest(key, tensor.dtype, tensor.shape, _rows_of(tensor))
      for key, tensor in tensors.items()
    }
    require(
      metadata[_DIGEST] == _file_digest(digests),
      f"{file} is damaged (its tensors are not those that were written): copy "
      f"it again, or drop {_DIGEST} from its metadata if you changed them",
    )
  return tensors


def _rows_of(tensor: StoredTensor) -> Iterator[np.ndarray]:
  """Yields the values of a tensor, some rows at a time."""
  for _, values in tensor.blocks():
    yield values


def _header(file: pathlib.Path) -> tuple[dict[str, Any], int]:
  """Checks a file with the library safetensors, and reads its header.

  Returns the header, and the byte of the file at which the values begin. Raises
  ValueError if the file is missing or damaged.
  """
  library = extra_package("safetensors", str(file), "weights")
  # The library would wait for ever to read from a FIFO.
  is_special = file.exists() and not file.is_file()
  require(not is_special, f"{file} is no file: copy the checkpoint again")
  try:
    # Opening the file by the library also finds offsets that overlap, leave
    # gaps, or lie beyond the end of the file.
    with library.safe_open(file, framework="np"):
      pass
    with file.open("rb") as opened:
      (size,) = struct.unpack("<Q", opened.read(8))
      text = opened.read(size)
  except (library.SafetensorError, OSError) as error:
    reason = str(error).partition("\n")[0]
    raise ValueError(f"{file} is damaged ({reason}): copy it again") from error
  return json_object(text, file, is_ours=False), 8 + size


def _tensor_digest(
  key: str,
  dtype: np.dtype,
  shape: tuple[int, ...],
  parts: Iterable[np.ndarray],
) -> bytes:
  """Returns the SHA-256 of name, type and shape, then that of the values."""
  description = f"{key} {dtype} {shape} "
  values_digest = hashlib.sha256()
  for part in parts:
    values_digest.update(_bytes_of(part))
  return hashlib.sha256(description.encode()).digest() + values_digest.digest()


def _file_digest(digests: Mapping[str, bytes]) -> str:
  """Returns a SHA-256 of the tensors' digests, as hex digits."""
  total = hashlib.sha256()
  for _, digest in sorted(digests.items()):
    total.update(digest)
  return total.hexdigest()


def _bytes_of(array: np.ndarray) -> memoryview:
  """Returns the bytes of an array's values."""
  # The types of `ml_dtypes`, such as bfloat16, have no buffer of their own.
  return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


class TensorShape(NamedTuple):
  """Name, type and shape of a tensor that is going to be written."""

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]

  @property
  def num_bytes(self) -> int:
    """Number of bytes of the tensor's values."""
    return math.prod(self.shape) * self.dtype.itemsize


def divided_among_files(
  tensors: Iterable[TensorShape], max_file_bytes: int
) -> dict[str, list[TensorShape]]:
  """Divides the tensors of a checkpoint among files, in order.

  Args:
    tensors: All tensors of the checkpoint.
    max_file_bytes: Largest number of bytes of values in a file. A larger tensor
      gets a file of its own.

  Returns:
    The tensors of each file, by name of the file. A single file is named
    "model.safetensors", several are named like
    "model-00001-of-00002.safetensors".
  """
  groups: list[list[TensorShape]] = [[]]
  num_bytes = 0
  for tensor in tensors:
    if groups[-1] and num_bytes + tensor.num_bytes > max_file_bytes:
      groups.append([])
      num_bytes = 0
    groups[-1].append(tensor)
    num_bytes += tensor.num_bytes
  if len(groups) == 1:
    return {TENSORS_FILE: groups[0]}
  count = len(groups)
  return {
    f"model-{number:05d}-of-{count:05d}{SUFFIX}": group
    for number, group in enumerate(groups, start=1)
  }


def write_index(
  folder: pathlib.Path, tensors_by_file: Mapping[str, list[TensorShape]]
) -> None:
  """Writes `model.safetensors.index.json`, which names each tensor's file."""
  weight_map = {}
  total_bytes = 0
  for file_name, tensors in tensors_by_file.items():
    for tensor in tensors:
      weight_map[tensor.name] = file_name
      total_bytes += tensor.num_bytes
  index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
  with files.replaced(folder / INDEX_FILE) as file:
    file.write(json.dumps(index, indent=2).encode() + b"\n")


def write_tensors(
  path: pathlib.Path,
  tensors: Iterable[TensorShape],
  values: Iterator[tuple[str, np.ndarray]],
) -> None:
  """Writes a file of safetensors, with its digest, one tensor at a time.

  Args:
    path: The file. It is replaced as a whole.
    tensors: The tensors of the file, in the order of `values`.
    values: Yields name and values of each tensor. Only the tensors of this file
      are taken from it.
  """
  tensors = list(tensors)
  # The digest is known only after the values. Its place in the header is
  # filled with zeros until then.
  header = _header_bytes(tensors, digest="0" * 64)
  digests = {}
  with files.replaced(path) as file:
    file.write(header)
    for tensor in tensors:
      name, array = next(values)
      is_expected = (name, array.dtype, array.shape) == tensor
      assert is_expected, f"{tensor} is to be written, not {name}"
      file.write(_bytes_of(array))
      digests[name] = _tensor_digest(*tensor, parts=[array])
    file.seek(0)
    file.write(_header_bytes(tensors, digest=_file_digest(digests)))


def _header_bytes(tensors: Iterable[TensorShape], digest: str) -> bytes:
  """Returns the bytes in front of the values of a file."""
  header: dict[str, Any] = {_METADATA: {"format": "pt", _DIGEST: digest}}
  begin = 0
  for tensor in tensors:
    end = begin + tensor.num_bytes
    header[tensor.name] = {
      "dtype": _NAMES[tensor.dtype],
      "shape": list(tensor.shape),
      "data_offsets": [begin, end],
    }
    begin = end
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % _ALIGNMENT)
  return struct.pack("<Q", len(text)) + text


def check_no_other_checkpoint(folder: pathlib.Path, written: set[str]) -> None:
  """Refuses a folder that has files of another checkpoint.

  Readers would mix the two checkpoints: `transformers` applies adapters that
  lie beside a model, and follows the index of an earlier save.

  Args:
    folder: Folder to write into.
    written: Names of the files that are about to be replaced.

  Raises:
    ValueError: One line that names a file of another checkpoint, or a path to
      be replaced that is neither a regular file nor a symbolic link.
  """
  for path in sorted(folder.iterdir()):
    is_tensors = path.name.endswith((SUFFIX, f"{SUFFIX}.index.json"))
    is_other = path.name.startswith(("pytorch_model", "adapter_"))
    is_settings = path.name in ("config.json", "generation_config.json")
    require(
      path.name in written or not (is_tensors or is_other or is_settings),
      f"{folder} has {path.name} of another checkpoint, which readers would "
      "take for a part of this one: take an empty folder",
    )
    require(
      path.name not in written or path.is_symlink() or path.is_file(),
      f"{path} is no file, and has to be replaced by one: take an empty folder",
    )
