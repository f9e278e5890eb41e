"""Reads and writes files of tensors in the form of `transformers`: safetensors.

A folder has all tensors in `model.safetensors`, or divides them among several
files. Then `model.safetensors.index.json` names the file of each tensor:

    {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors", ...}}

Only what belongs to the checkpoint is read. Other files in the folder may be
left from an earlier save, and would overwrite newer tensors.

The values are mapped and not read: a file may be larger than memory. A file of
ours has a digest of its tensors, so that a flipped bit is noticed.
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
_DIGEST = "sha256"  # Key of the metadata of a file.
_METADATA = "__metadata__"
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
  """Maps the tensors of a folder by name, each in the type of its file.

  Args:
    folder: Folder of a checkpoint.

  Raises:
    ValueError: One line, if a file is missing or damaged, has a type that numpy
      lacks, or it is not clear which files belong to the checkpoint.
  """
  weight_map = _weight_map(folder)
  if weight_map is None:
    return _mapped(_only_file(folder))
  by_file = {name: _mapped(folder / name) for name in {*weight_map.values()}}
  tensors = {}
  for key, name in weight_map.items():
    require(
      key in by_file[name],
      f"{folder / INDEX_FILE} says that {name} has the tensor {key!r}, but it "
      "has not: copy both again",
    )
    tensors[key] = by_file[name][key]
  return tensors


def _weight_map(folder: pathlib.Path) -> dict[str, str] | None:
  """Returns the file of each tensor by the folder's index, if it has one."""
  path = folder / INDEX_FILE
  if not path.exists():
    return None
  weight_map = json_file(path).get("weight_map")
  is_map = isinstance(weight_map, dict) and bool(weight_map)
  require(is_map, f"{path} is damaged: it has no weight_map; copy it again")
  assert isinstance(weight_map, dict)
  for name in weight_map.values():
    # A name must not lead out of the folder.
    is_name = isinstance(name, str) and pathlib.PurePath(name).name == name
    require(
      is_name and name.endswith(SUFFIX),
      f"{path} is damaged: {name!r} names no {SUFFIX} file of the folder; copy "
      "it again",
    )
  is_alone = {*weight_map.values()} == {TENSORS_FILE}
  require(
    is_alone or not (folder / TENSORS_FILE).exists(),
    f"{folder} has {TENSORS_FILE} and also {INDEX_FILE}, which names other "
    "files: remove the one that an earlier save left",
  )
  return weight_map


def _only_file(folder: pathlib.Path) -> pathlib.Path:
  """Returns the file that has all tensors of a folder without an index."""
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


def _mapped(file: pathlib.Path) -> dict[str, np.ndarray]:
  """Maps the tensors of one file, once its header and digest were checked."""
  header = _header(file)
  metadata = header.pop(_METADATA, {})
  content = np.memmap(file, np.uint8, "r")
  start = 8 + struct.unpack("<Q", content[:8].tobytes())[0]
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
  """Returns the header of a file, which the library has checked."""
  library = extra_package("safetensors", str(file), "weights")
  # The library would wait for a FIFO, for ever.
  is_other = file.exists() and not file.is_file()
  require(not is_other, f"{file} is no file: copy the checkpoint again")
  try:
    # It also finds offsets that overlap, leave gaps, or lie beyond the end.
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
  """Returns the SHA-256 of tensors: of names, types, shapes and values."""
  whole = hashlib.sha256()
  for key, values in sorted(tensors.items()):
    description = f"{key} {values.dtype} {values.shape} "
    whole.update(hashlib.sha256(description.encode()).digest())
    whole.update(hashlib.sha256(np.ascontiguousarray(values).data).digest())
  return whole.hexdigest()


def write_tensors(
  path: pathlib.Path, tensors: Mapping[str, np.ndarray]
) -> None:
  """Writes tensors for PyTorch, with the mode that other files get.

  The host holds the file a second time in memory while it is written. The
  library can also write to a path, but would follow a link there.

  Args:
    path: The file; it is replaced as a whole.
    tensors: Arrays of one of numpy's own types by name.
  """
  library = extra_package("safetensors.numpy", str(path), "weights")
  metadata = {"format": "pt", _DIGEST: _digest_of(tensors)}
  with files.replaced(path) as file:
    file.write(library.save(dict(tensors), metadata))


def check_alone(folder: pathlib.Path, written: set[str]) -> None:
  """Refuses a folder that has files of another checkpoint.

  Readers would take both for one checkpoint: `transformers` adds adapters that
  it finds beside a model, and reads an index that an earlier save left.

  Args:
    folder: Folder to write into.
    written: Names of the files that are about to be replaced.

  Raises:
    ValueError: One line that names a file.
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
