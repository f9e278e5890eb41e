"""Has Orbax keep the arrays of one process in a file of their own.

Orbax's own handlers expect that all processes write to one directory, and let
process 0 write arrays that are not divided. Here every process writes what it
is given, and any process may read it later, whatever its number is.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import future

_FILE = "arrays.npz"


class LocalArraysHandler(ocp.AsyncCheckpointHandler):
  """Writes numpy arrays in the background, and reads them."""

  async def async_save(self, directory: Any, args: "LocalArrays") -> list:
    """Starts to write; the arrays must not change until all is written.

    Args:
      directory: Folder of this item.
      args: The arrays.

    Returns:
      The future of the background task.
    """

    async def write() -> None:
      self.save(directory, args)

    return [future.CommitFutureAwaitingContractedSignals(write())]

  def save(self, directory: Any, args: "LocalArrays") -> None:
    """Writes at once.

    Args:
      directory: Folder of this item.
      args: The arrays.
    """
    np.savez(directory / _FILE, **args.arrays)

  def restore(self, directory: Any, args: "LocalArrays") -> dict[str, Any]:
    """Reads the arrays, as `read` does.

    Args:
      directory: Folder of this item.
      args: Shapes and types of the arrays, by name.
    """
    return read(directory, args.arrays)


@ocp.args.register_with_handler(
  LocalArraysHandler, for_save=True, for_restore=True
)
@dataclasses.dataclass
class LocalArrays(ocp.args.CheckpointArgs):
  """Arrays by name; to read them, their shapes and types are enough."""

  arrays: Mapping[str, Any]


def read(
  directory: pathlib.Path, like: Mapping[str, Any]
) -> dict[str, np.ndarray]:
  """Reads the arrays of one process.

  Args:
    directory: Folder that `LocalArraysHandler` has written to.
    like: Arrays of the same names, shapes and types, or these alone.

  Raises:
    ValueError: If a shape or a type differs.
    KeyError: If a name is missing.
  """
  with np.load(directory / _FILE) as file:
    return {name: _typed(name, file[name], x) for name, x in like.items()}


def _typed(name: str, found: np.ndarray, like: Any) -> np.ndarray:
  """Gives bytes their type: numpy's format keeps bfloat16 as two bytes."""
  dtype = np.dtype(like.dtype)
  is_same = found.dtype == dtype or found.dtype == f"V{dtype.itemsize}"
  if found.shape != like.shape or not is_same:
    raise ValueError(
      f"{name} has shape {found.shape} of {found.dtype}, and {like.shape} of "
      f"{dtype} is needed"
    )
  return found.view(dtype)


def placed(
  like: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
  """Puts whole arrays on the devices that hold them, or parts of them.

  Args:
    like: Shapes and shardings by name.
    arrays: The arrays.
  """
  return {
    name: jax.make_array_from_callback(
      leaf.shape, leaf.sharding, arrays[name].__getitem__
    )
    for name, leaf in like.items()
  }
