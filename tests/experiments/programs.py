"""Programs that run in this process, as if typed on a command line."""

import contextlib
import dataclasses
import io
import logging
import runpy
import signal
import sys
import warnings
from collections.abc import Iterator
from unittest import mock

from absl import app, flags
from absl.testing import flagsaver

# These define flags that several programs share and that a program may leave
# out. They are imported once.
from experiments.runtime import (  # noqa: F401
  config_flag,
  distributed_flags,
  losses_flag,
  memory_flag,
  parts_flag,
  workdir_flag,
)


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
  code = 0
  out = io.StringIO()
  err = io.StringIO()
  try:
    with (
      _forgotten_flags(),
      _restored_signals_and_logs(),
      mock.patch.object(sys, "argv", ["", *map(str, arguments)]),
      contextlib.redirect_stdout(out),
      contextlib.redirect_stderr(err),
      warnings.catch_warnings(),
    ):
      # ml_collections loads config files in an old way.
      warnings.simplefilter("ignore", DeprecationWarning)
      runpy.run_module(
        f"experiments.{program}", run_name="__main__", alter_sys=True
      )
  except SystemExit as ended:
    code = int(ended.code or 0)
  return Done(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _forgotten_flags() -> Iterator[None]:
  """Forgets the flags that a program defines, and the values of all flags."""
  app.define_help_flags()
  modules_before = set(sys.modules)
  saved_values = flagsaver.save_flag_values()
  try:
    yield
  finally:
    # Another program may import these modules, and define their flags anew.
    for module in set(flags.FLAGS.flags_by_module_dict()) & set(sys.modules):
      if module not in modules_before:
        package, _, name = module.rpartition(".")
        delattr(sys.modules[package], name)
        del sys.modules[module]
    flagsaver.restore_flag_values(saved_values)
    flags.FLAGS.unparse_flags()


@contextlib.contextmanager
def _restored_signals_and_logs() -> Iterator[None]:
  root = logging.getLogger()
  handlers = root.handlers[:]
  level = root.level
  handler_of_sigterm = signal.getsignal(signal.SIGTERM)
  try:
    yield
  finally:
    root.handlers[:] = handlers
    root.setLevel(level)
    signal.signal(signal.SIGTERM, handler_of_sigterm)
