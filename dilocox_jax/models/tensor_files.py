"""Reads and writes tensors as `transformers` does, in files of safetensors.

A checkpoint is a folder. All tensors are in `model.safetensors`, or they are
divided among several files. In the second case `model.safetensors.index.json`
names the file of each tensor:

    {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors", ...}}

Only the files of the checkpoint are read. The folder may have files of an
earlier save, whose older tensors would replace the newer ones.

Files are mapped into memory, because a file may be larger than memory. A file
that this module has written contains a digest of its tensors, so that a flipped
bit is noticed when the file is read.
"""

import hashlib
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

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


def read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Maps the tensors of a checkpoint into memory.

  Args:
    folder: Folder of the checkpoint.

  Returns:
    The tensors by name, in the types that their files have.

  Raises:
    ValueError: One line, if a file is missing or damaged, if a tensor has a
      type that numpy lacks, or if it is not clear which files belong to the
      checkpoint.
  """
  weight_map = _weight_map(folder)
  if weight_map is None:
    return _map_file(_only_file(folder))
  file_names = set(weight_map.values())
  by_file = {name: _map_file(folder / name) for name in file_names}
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
  """Returns the name of the file of each tensor, from the folder's index.

  Returns:
    Names of files by names of tensors; None if the folder has no index.

  Raises:
    ValueError: One line, if the index is damaged, or if the folder also has a
      file with all tensors.
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

  Raises:
    ValueError: One line, if there is no such file, or if there are several.
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


def _map_file(file: pathlib.Path) -> dict[str, np.ndarray]:
  """Maps the tensors of one file into memory, and checks header and digest.

  Returns:
    The tensors by name.

  Raises:
    ValueError: One line, if the file is missing or damaged, or if a tensor has
      a type that numpy lacks.
  """
  header = _header(file)
  metadata = header.pop(_METADATA, {})
  content = np.memmap(file, np.uint8, "r")
  # The first 8 bytes are the length of the header, and the values follow it.
  (header_size,) = struct.unpack("<Q", content[:8].tobytes())
  start = 8 + header_size
  tensors = {}
  for key, entry in header.items():
    name = entry["dtype"]
    require(
      name in _DTYPES,
      f"{file}: the tensor {key!r} has the type {name}, which cannot be read "
      f"here: convert it to one of {', '.join(_DTYPES)}",
    )
    begin, end = entry["data_offsets"]
    values = content[start + begin : start + end].view(_DTYPES[name])
    tensors[key] = values.reshape(entry["shape"])
  if _DIGEST in metadata:
    require(
      metadata[_DIGEST] == _digest_of(tensors),
      f"{file} is damaged (its tensors are not those that were written): copy "
      f"it again, or drop {_DIGEST} from its metadata if you changed them",
    )
  return tensors


def _header(file: pathlib.Path) -> dict[str, Any]:
  """Returns the header of a file, after the library has checked the file.

  Raises:
    ValueError: One line, if the file is missing, damaged or no regular file.
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
  return json_object(text, file, is_ours=False)


def _digest_of(tensors: Mapping[str, np.ndarray]) -> str:
  """Returns the SHA-256 of names, types, shapes and values of tensors (hex)."""
  total = hashlib.sha256()
  for key, values in sorted(tensors.items()):
    description = f"{key} {values.dtype} {values.shape} "
    total.update(hashlib.sha256(description.encode()).digest())
    total.update(hashlib.sha256(np.ascontiguousarray(values).data).digest())
  return total.hexdigest()


def write_tensors(
  path: pathlib.Path, tensors: Mapping[str, np.ndarray]
) -> None:
  """Writes a file of tensors that PyTorch can read.

  The file gets the same permissions as the other files of this package. While
  it is written, the host holds a second copy of the tensors in memory. The
  library could write to the path without a copy, but it would follow a link.

  Args:
    path: The file. It is replaced as a whole.
    tensors: Arrays by name, of types that numpy itself has.
  """
  library = extra_package("safetensors.numpy", str(path), "weights")
  metadata = {"format": "pt", _DIGEST: _digest_of(tensors)}
  with files.replaced(path) as file:
    file.write(library.save(dict(tensors), metadata))


def check_alone(folder: pathlib.Path, written: set[str]) -> None:
  """Refuses a folder that has files of another checkpoint.

  Readers would take the files for one checkpoint: `transformers` applies
  adapters that lie beside a model, and follows the index of an earlier save.

  Args:
    folder: Folder to write into.
    written: Names of the files that are about to be replaced.

  Raises:
    ValueError: One line that names a file of another checkpoint, or a path to
      be replaced that is no regular file.
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
