"""Programs that run in this process, as if typed on a command line."""

import contextlib
import dataclasses
import io
import pathlib
import runpy
import signal
import sys
import warnings
from unittest import mock

from absl import app, flags

_FOLDER = pathlib.Path(__file__).parents[2] / "experiments"


@dataclasses.dataclass
class Done:
  """How a program ended."""

  returncode: int
  stdout: str
  stderr: str

  @property
  def one_line(self):
    """The only line on standard error."""
    (line,) = self.stderr.splitlines()
    return line


def run(program, *arguments):
  """Runs experiments.PROGRAM, whose flags are forgotten afterwards."""
  app.define_help_flags()
  known, code = set(flags.FLAGS), 0
  before = signal.getsignal(signal.SIGTERM)
  out, err = io.StringIO(), io.StringIO()
  try:
    with (
      mock.patch.object(sys, "argv", ["", *map(str, arguments)]),
      contextlib.redirect_stdout(out),
      contextlib.redirect_stderr(err),
      warnings.catch_warnings(),
    ):
      # ml_collections loads config files in an old way.
      warnings.simplefilter("ignore", DeprecationWarning)
      runpy.run_path(
        f"{_FOLDER}/{program.replace('.', '/')}.py", None, "__main__"
      )
  except SystemExit as ended:
    code = int(ended.code or 0)
  finally:
    signal.signal(signal.SIGTERM, before)
    done = Done(code, out.getvalue(), err.getvalue())
    for flag in set(flags.FLAGS) - known:
      delattr(flags.FLAGS, flag)
    flags.FLAGS.unparse_flags()
  return done
