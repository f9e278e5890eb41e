"""Has Orbax keep the arrays of one process in a file of their own.

Orbax's own handlers expect that all processes write to one directory, and let
process 0 write arrays that are not divided. Here every process writes what it
is given, and any process may read it later, whatever its number is.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

_FILE = "arrays.npz"


class LocalArraysHandler(ocp.AsyncCheckpointHandler):
  """Writes numpy arrays in the background, and reads them."""

  async def async_save(self, directory: Any, args: "LocalSave") -> list:
    """Starts to write; the arrays must not change until all is written.

    Args:
      directory: Folder of this item.
      args: The arrays.

    Returns:
      The future of the background task.
    """

    async def write() -> None:
      np.savez(directory / _FILE, **args.arrays)

    return [ocp.future.CommitFutureAwaitingContractedSignals(write())]

  def save(self, directory: Any, args: "LocalSave") -> None:
    """Writes at once."""
    np.savez(directory / _FILE, **args.arrays)

  def restore(self, directory: Any, args: "LocalRestore") -> dict[str, Any]:
    """Reads the arrays.

    Args:
      directory: Folder of this item.
      args: Arrays of the same names, shapes and types.

    Raises:
      ValueError: If shapes differ.
      KeyError: If a name is missing.
    """
    with np.load(directory / _FILE) as file:
      return {
        # numpy's format does not know bfloat16, but keeps its bits.
        name: file[name].view(like.dtype).reshape(like.shape)
        for name, like in args.arrays.items()
      }


@ocp.args.register_with_handler(LocalArraysHandler, for_save=True)
@dataclasses.dataclass
class LocalSave(ocp.args.CheckpointArgs):
  """Arrays to write, by name."""

  arrays: Mapping[str, np.ndarray]


@ocp.args.register_with_handler(LocalArraysHandler, for_restore=True)
@dataclasses.dataclass
class LocalRestore(ocp.args.CheckpointArgs):
  """Arrays of the names, shapes and types to read."""

  arrays: Mapping[str, np.ndarray]
