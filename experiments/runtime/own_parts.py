"""Registers parts of the user's own before a program reads a run.

A run saves the names of its parts, and not the code behind them. So a program
that reads a run or a config (`command_line.main`), and a process that makes one
run of a sweep, first run the file that registers the parts.
"""

import pathlib
import runpy
from collections.abc import Iterable

from absl import flags

from dilocox_jax.checks import require

# In --help, flags are listed under the program that asks for them, not here.
flags.disclaim_key_flags()


def define_parts() -> None:
  """Defines --parts."""
  flags.DEFINE_multi_string(
    "parts",
    [],
    "Python file that registers parts of your own which the run has, for "
    "example the run's config file. It is run first; may be given repeatedly. "
    "Parts that were handed in to dilocox_jax.train cannot be given so.",
  )


def register_parts(paths: Iterable[str]) -> None:
  """Runs the files of --parts, in order.

  Raises:
    ValueError: If a path is not a file, or its code raises an error.
  """
  for path in paths:
    require(pathlib.Path(path).is_file(), f"--parts={path} is not a file")
    try:
      runpy.run_path(path, run_name=f"own_parts_{pathlib.Path(path).stem}")
    except Exception as error:  # The file is code and may raise anything.
      reason = f"{type(error).__name__}: {error}"
      raise ValueError(f"--parts={path}: {reason}") from error
