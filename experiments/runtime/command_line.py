"""Reads a program's command line, and reports expected errors as one line.

Most programs in `experiments` have this form:

  @command_line.one_line_errors()
  def main(argv: Sequence[str]) -> None:
    command_line.refuse_arguments(argv)
    ...

  if __name__ == "__main__":
    app.run(main, flags_parser=command_line.parse_flags)

A program that stops early usually prints one line on standard error. These exit
codes have a meaning:

  1    The run cannot go on, or there is a bug (with a traceback).
  2    The input is wrong.
  75   Another process holds the work directory or was lost, or the time limit
       is over. The same command, started again, continues the run.
  130  Ctrl-C stopped the program (128 + 2, the number of SIGINT).
  141  The reader of its output has gone, e.g. `head` (128 + 13, SIGPIPE).
  143  SIGTERM stopped the program (128 + 15).
"""

import contextlib
import io
import logging
import math
import os
import select
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import app, flags
from absl import logging as absl_logging

from dilocox_jax.checks import known, printable
from dilocox_jax.metrics.lines import RecordError
from dilocox_jax.metrics.work_directory import BusyError, RefusedError

TRY_AGAIN = 75  # EX_TEMPFAIL in sysexits.h.
PIPE_CLOSED = 141  # SIGPIPE is 13.
INTERRUPTED = 130  # Shells use 128 + the signal's number; SIGINT is 2.
# A process that was asked to stop saves, and ends with one of these exit codes.
STOP_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
# Environment variable with the command that the user typed. A program that
# starts others sets it for them.
COMMAND_VARIABLE = "DILOCOX_JAX_COMMAND"
# Loggers of libraries of which only warnings are shown.
_QUIET_LOGGERS = ("absl", "jax", "orbax")


class UsageError(Exception):
  """Raised if a program's input is wrong. The message says what to change."""


class SavedAndStoppedError(Exception):
  """Raised if a signal has stopped a run after the run had saved its state.

  Attributes:
    exit_code: Exit code of the program, 128 plus the number of the signal.
  """

  def __init__(self, message: object, stop_signal: int):
    """Sets the exit code to 128 + the number of the signal, as shells do."""
    super().__init__(message)
    self.exit_code = 128 + stop_signal


class StoppedError(Exception):
  """Raised if a run cannot go on. The message says why.

  Attributes:
    exit_code: Exit code of the program.
  """

  def __init__(self, message: object, exit_code: int = 1):
    super().__init__(message)
    self.exit_code = exit_code


# Errors that end a program with one line, with their exit codes.
_CODES = {UsageError: 2, RefusedError: 2, BusyError: TRY_AGAIN, RecordError: 1}
# The same errors, and the one that brings its own exit code.
ENDINGS: tuple[type[Exception], ...] = (*_CODES, StoppedError)


class OneLine(logging.Formatter):
  """Formats a log message as one line, with escapes for control characters."""

  def formatMessage(self, record: logging.LogRecord) -> str:
    """Returns the message as one line; `format` adds a traceback, if any."""
    return printable(super().formatMessage(record))


def exit_code(error: Any) -> int:
  """Returns the exit code for an error of one of the types in `ENDINGS`."""
  return _CODES.get(type(error)) or error.exit_code


def parse_flags(argv: Sequence[str]) -> list[str]:
  """Parses the flags of a program, as the `flags_parser` of `app.run`.

  A mistake prints one line and exits with code 2; help exits with code 0.
  `argv` has the path of the program in front.

  Returns:
    The path of the program, and the arguments that are no flags.
  """
  set_up_terminal()
  with one_line_errors():
    return read_flags(argv)


def set_up_terminal() -> None:
  """Prepares the standard streams and the log for lines that a user reads.

  Each log message becomes one line. The loggers of jax, orbax and absl show
  only warnings. Characters that standard output cannot encode are escaped. A
  standard stream that is closed is connected to the null device.
  """
  _open_closed_streams()
  if isinstance(sys.stdout, io.TextIOWrapper):
    # A path may have bytes or letters that the output has no encoding for.
    sys.stdout.reconfigure(errors="backslashreplace")
  absl_logging.get_absl_handler().setFormatter(OneLine("%(message)s"))
  # Absl sets the levels of loggers after it has parsed the flags.
  app.call_after_init(_quiet_libraries)


def read_flags(argv: Sequence[str]) -> list[str]:
  """Parses the flags of a program; --help prints and exits with code 0.

  `argv` has the path of the program in front.

  Returns:
    The path of the program, and the arguments that are no flags.

  Raises:
    UsageError: If a flag does not exist or has a wrong value, or if a required
      flag is missing.
  """
  if "h" not in flags.FLAGS:
    flags.DEFINE_alias("h", "help")
  try:
    arguments = flags.FLAGS(argv)
  except flags.Error as error:
    raise UsageError(error) from error
  except SystemExit:  # absl exits with an error code after it has printed help.
    sys.stdout.flush()
    sys.exit(0)
  _refuse_nan()
  return arguments


def _refuse_nan() -> None:
  """Raises UsageError if the value of a flag is NaN."""
  for name, value in flags.FLAGS.flag_values_dict().items():
    # NaN passes the comparisons of absl with a flag's bounds.
    if isinstance(value, float) and math.isnan(value):
      raise UsageError(f"--{name}=nan must be a number")


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
  """Ends the program with one line if the block raises an expected error.

  Expected are the errors in `ENDINGS` (such as `UsageError`),
  `SavedAndStoppedError` and KeyboardInterrupt (Ctrl-C). If the reader of
  standard output has gone, the program ends without a line. Other errors pass
  through. The function can also decorate `main`.
  """
  try:
    yield
    sys.stdout.flush()
  except ENDINGS as error:
    print_error(error)
    sys.exit(exit_code(error))
  except SavedAndStoppedError as request:
    print(request, file=sys.stderr)
    sys.exit(request.exit_code)
  except KeyboardInterrupt:
    print_error(StoppedError("interrupted"))
    sys.exit(INTERRUPTED)
  except BrokenPipeError:
    _leave_closed_output()
    raise


def _quiet_libraries() -> None:
  """Lets jax, orbax and absl log only warnings."""
  for name in _QUIET_LOGGERS:
    logging.getLogger(name).setLevel(logging.WARNING)


def _open_closed_streams() -> None:
  """Opens the null device for each standard stream that is closed."""
  # A file that a library opens could get the number of a closed stream, say of
  # standard error, and warnings would be written into it.
  # `os.open` returns the lowest number that is free. The standard streams have
  # the numbers 0 to 2.
  while True:
    number = os.open(os.devnull, os.O_RDWR)
    if number > 2:
      break
    os.set_inheritable(number, True)
  os.close(number)
  sys.stdin = sys.stdin or open(0, closefd=False)
  sys.stdout = sys.stdout or open(1, "w", closefd=False)
  sys.stderr = sys.stderr or open(2, "w", closefd=False)


def _leave_closed_output() -> None:
  """Exits with code 141 if the reader of standard output has gone."""
  output = select.poll()
  output.register(sys.stdout, 0)
  if any(event & select.POLLERR for _, event in output.poll(0)):
    # Python would try once more to write what is left, and print a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(PIPE_CLOSED)


@contextlib.contextmanager
def usage_errors(
  where: str = "", kinds: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
  """Turns errors of the block into a `UsageError`.

  Args:
    where: Text in front of the message, such as "--config: ". The message of a
      KeyError is only a name, so "no field " is put in front of the name.
    kinds: Types of errors to turn into a `UsageError`.
  """
  try:
    yield
  except kinds as error:
    field = "no field " if isinstance(error, KeyError) else ""
    raise UsageError(f"{where}{field}{error}") from error


def refuse_arguments(argv: Sequence[str]) -> None:
  """Raises UsageError if `argv` has arguments that are no flags.

  The first entry of `argv` is the path of the program.
  """
  if len(argv) > 1:
    raise UsageError(f"unexpected argument {argv[1]!r}: flags start with --")


def chosen_argument(
  what: str, argv: Sequence[str], names: Sequence[str]
) -> str:
  """Returns the one argument of a program, which must be one of `names`.

  Args:
    what: What the argument names, for the message, e.g. "bench".
    argv: The path of the program, and the arguments that are no flags.
    names: The names that are allowed.

  Raises:
    UsageError: If there is not exactly one argument, or it is none of the
      names.
  """
  if len(argv) != 2:
    raise UsageError(f"name one {what}: {', '.join(names)}")
  name = argv[1]
  with usage_errors():
    known(what, name, names)
  return name


def refuse_unused(
  *holders: flags.FlagHolder, is_used: bool, needs: str
) -> None:
  """Raises UsageError if flags are given that the program does not read.

  Args:
    *holders: The flags.
    is_used: Whether the program reads these flags in this call.
    needs: Words for the message that say what the flags need, e.g. "--cluster".
  """
  for holder in holders:
    if holder.present and not is_used:
      raise UsageError(f"--{holder.name} needs {needs}: else nothing reads it")


def typed_command() -> str:
  """Returns the command line of this program as a user would type it.

  Example: "python -m experiments.train --workdir=/tmp/run".
  """
  spec = sys.modules["__main__"].__spec__
  program = ["-m", spec.name] if spec else [sys.argv[0]]
  return shlex.join(["python", *program, *sys.argv[1:]])


def print_error(error: Exception, where: str = "") -> None:
  """Prints "error: " and the message of an error on standard error.

  The message becomes one line. The text `where`, such as "name: ", is put in
  front of it.
  """
  line = " ".join(str(error).split())
  print(printable(f"error: {where}{line}"), file=sys.stderr)
