"""The flag --workdir, and the directory in which a program writes."""

import pathlib
import tempfile

from absl import flags

from dilocox_jax.metrics import work_directory
from dilocox_jax.metrics.work_directory import RefusedError
from experiments.runtime.command_line import UsageError

WORKDIR = flags.DEFINE_string(
  "workdir", None, "Directory of results; it is made if missing."
)


def writable(workdir: str | None, program: str) -> pathlib.Path:
  """Makes the work directory and checks that a program may write in it.

  Args:
    workdir: Value of --workdir; None if the flag is not given.
    program: Name of the program. A directory with files that this program did
      not make is refused.

  Returns:
    Path of the work directory.

  Raises:
    UsageError: If --workdir is missing, refused or cannot be written.
  """
  if not workdir:
    raise UsageError("--workdir is missing: say where the results should go")
  try:
    path = work_directory.claim(workdir, program)
    # An old directory may be read-only, and then this raises OSError.
    with tempfile.TemporaryFile(dir=path):
      return path
  except RefusedError as error:
    raise UsageError(f"--workdir={error}") from error
  except OSError as error:
    raise UsageError(
      f"--workdir={workdir} cannot be written ({error.strerror}): choose"
      " another directory"
    ) from error
