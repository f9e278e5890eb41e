"""The flag --parts: Python files that register a user's own parts.

*Parts* are e.g. codecs and methods, which a config chooses by name. The files
run before the program checks a config or loads a run that names such parts.
"""

import pathlib
import runpy
from collections.abc import Iterable

from absl import flags

from dilocox_jax.checks import require
from experiments.runtime import command_line

PARTS = flags.DEFINE_multi_string(
  "parts",
  [],
  "Python file that registers parts of your own which the run has, for "
  "example the run's config file. It is run first; may be given repeatedly. "
  "Parts that were passed in to dilocox_jax.train cannot be given so.",
)


def register() -> None:
  """Runs the files of --parts, in order.

  Raises:
    UsageError: If a path is not a file, or its code raises an error.
  """
  with command_line.usage_errors():
    register_parts(PARTS.value)


def register_parts(paths: Iterable[str]) -> None:
  """Runs Python files that register parts, in order.

  Raises:
    ValueError: If a path is not a file, or its code raises an error.
  """
  for path in paths:
    require(pathlib.Path(path).is_file(), f"--parts={path} is not a file")
    try:
      runpy.run_path(path, run_name=f"parts_{pathlib.Path(path).stem}")
    # The file is code and may raise anything, or end the program.
    except (Exception, SystemExit) as error:
      reason = f"{type(error).__name__}: {error}"
      raise ValueError(f"--parts={path}: {reason}") from error
