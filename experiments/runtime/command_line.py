"""Flags, logging and one-line errors that all programs here share.

A program that stops early prints one line on standard error and exits with one
of these codes:

  1    The run cannot go on.
  2    The input is wrong.
  75   Another process holds the work directory or was lost, or the time limit
       is over. A scheduler may start the same command again: the run goes on.
  130  Ctrl-C stopped the program (128 + 2, the number of SIGINT).
  141  Whoever read its output has gone, e.g. `head` (128 + 13, SIGPIPE).
  143  SIGTERM stopped the program (128 + 15).

Any other error is a bug, and its traceback is printed.
"""

import contextlib
import io
import logging
import math
import os
import pathlib
import re
import select
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from absl import app, flags
from ml_collections import config_dict, config_flags

from dilocox_jax.checks import printable
from dilocox_jax.metrics import work_directory
from dilocox_jax.metrics.lines import RecordError
from dilocox_jax.metrics.work_directory import BusyError, RefusedError
from experiments.runtime import own_parts

TRY_AGAIN = 75  # EX_TEMPFAIL in sysexits.h.
PIPE_CLOSED = 141  # SIGPIPE is 13.
INTERRUPTED = 130  # Shells use 128 + the signal's number; SIGINT is 2.
# A process that was asked to stop saves, and ends with one of these exit codes.
STOP_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
COMMAND_VARIABLE = "DILOCOX_JAX_COMMAND"  # What a user typed to start it all.

# Folder of the config files that come with the programs.
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_DEFAULT_CONFIG = CONFIGS / "default.py"

# In --help, flags are listed under the program that asks for them, not here.
flags.disclaim_key_flags()


class UsageError(Exception):
  """Means that the input is wrong. The message says what to change."""


class SavedAndStoppedError(Exception):
  """Means that a signal stopped a run after it had saved its state."""

  def __init__(self, message: object, stop_signal: int):
    """Sets the exit code to the one that shells use for the signal.

    Args:
      message: One line for the user.
      stop_signal: Number of the signal, e.g. 15 for SIGTERM.
    """
    super().__init__(message)
    self.exit_code = 128 + stop_signal


class StoppedError(Exception):
  """Means that a run cannot go on. The message says why."""

  def __init__(self, message: object, exit_code: int = 1):
    super().__init__(message)
    self.exit_code = exit_code


# What ends a program with one line.
_CODES = {UsageError: 2, RefusedError: 2, BusyError: TRY_AGAIN, RecordError: 1}
ENDINGS: tuple[type[Exception], ...] = (*_CODES, StoppedError)


class OneLine(logging.Formatter):
  """Writes a message on one line, without what a terminal would act on."""

  def formatMessage(self, record: logging.LogRecord) -> str:
    """Returns the line of a message; a traceback may follow it."""
    return printable(super().formatMessage(record))


def exit_code(error: Any) -> int:
  """Returns the exit code of one of `ENDINGS`."""
  return _CODES.get(type(error)) or error.exit_code


def main(
  function: Callable[[flags.FlagValues], None],
  define_flags: Callable[[], None],
  check_field: Callable[[str], None] | None = None,
  positional: str = "",
) -> None:
  """Runs a binary.

  Args:
    function: Function that does the work, with the flags as its argument. It
      raises one of `ENDINGS`: `UsageError` if the input is wrong, and
      `StoppedError` if it cannot go on.
    define_flags: Function that defines the flags and loads config files.
    check_field: Function that raises ValueError if --config has no field with
      a dotted name. By default it checks the fields of `RunConfig`.
    positional: Name of a multi-string flag that takes the arguments without
      dashes; "" if the program has no such arguments.
  """
  _open_closed_streams()
  logging.basicConfig(level=logging.INFO)
  for handler in logging.getLogger().handlers:
    handler.setFormatter(OneLine("%(message)s"))
  for library in ("absl", "jax", "orbax"):
    logging.getLogger(library).setLevel(logging.WARNING)
  if isinstance(sys.stdout, io.TextIOWrapper):
    # A path may have bytes or letters that the output has no encoding for.
    sys.stdout.reconfigure(errors="backslashreplace")
  try:
    _parse(define_flags, check_field or _check_run_field, positional)
    if "parts" in flags.FLAGS:
      with usage_errors():
        own_parts.register_parts(flags.FLAGS.parts)
    function(flags.FLAGS)
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


def _open_closed_streams() -> None:
  """Has standard streams that were closed lead to nowhere.

  The next file would else take the place of, say, standard error, and get what
  a library writes there.
  """
  while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
    os.set_inheritable(number, True)
  os.close(number)
  sys.stdin = sys.stdin or open(0, closefd=False)
  sys.stdout = sys.stdout or open(1, "w", closefd=False)
  sys.stderr = sys.stderr or open(2, "w", closefd=False)


def _leave_closed_output() -> None:
  """Ends the program if whoever read its output has gone."""
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
  """Turns errors inside the block into `UsageError`.

  Args:
    where: Text in front of the message, such as "--config: ".
    kinds: Types of the errors that wrong input raises there.
  """
  try:
    yield
  except kinds as error:
    field = "no field " if isinstance(error, KeyError) else ""
    raise UsageError(f"{where}{field}{error}") from error


def memory_bytes(values: flags.FlagValues) -> float | None:
  """Returns what --memory says (bytes), or None if it is not given."""
  from dilocox_jax.simulate.quantities import SIZE, parse_quantity

  if values.memory is None:
    return None
  with usage_errors():
    size = parse_quantity(values.memory, SIZE, "--memory")
  if not 0 < size < math.inf:
    raise UsageError("--memory must be above 0, and finite")
  return size


def refuse_unused(
  values: flags.FlagValues, uses: Iterable[tuple[str, bool, str]]
) -> None:
  """Refuses flags that were given and that nothing would read.

  Args:
    values: The flags.
    uses: Name of each flag, whether it is read, and what it needs for that.

  Raises:
    UsageError: If a flag was given and is not read.
  """
  for name, is_read, needed in uses:
    if values[name].present and not is_read:
      raise UsageError(f"--{name} needs {needed}: else nothing reads it")


def is_config_given() -> bool:
  """Whether the command line has --config, or a field of it."""
  return any(re.match(r"--?(no)?config\b", each) for each in sys.argv[1:])


def own_command() -> str:
  """Returns the command line as one would type it in the checkout."""
  script = pathlib.Path(sys.argv[0])
  folder = script.parent.name
  module = f"{folder}.{script.stem}"
  if folder == "tools":
    module = f"{script.parent.parent.name}.{module}"
  return shlex.join(["python", "-m", module, *sys.argv[1:]])


def print_error(error: Exception, where: str = "") -> None:
  """Prints an error as one line on standard error.

  Args:
    error: Error whose message is printed.
    where: Text in front of the message, such as "name: "; may be empty.
  """
  line = " ".join(str(error).split())
  print(printable(f"error: {where}{line}"), file=sys.stderr)


def _parse(
  define_flags: Callable[[], None],
  check_field: Callable[[str], None],
  positional: str,
) -> None:
  try:
    app.define_help_flags()
    define_flags()
    _check_config_file()
    arguments = flags.FLAGS(["--help" if a == "-h" else a for a in sys.argv])
  except SystemExit:  # absl exits with an error code after it has printed help.
    sys.stdout.flush()
    sys.exit(0)
  except (UsageError, BrokenPipeError):
    raise
  except Exception as error:  # A config file is code and may raise anything.
    _check_overrides(check_field)
    raise UsageError(_reason(error)) from None
  _check_values()
  if positional and arguments[1:]:
    flags.FLAGS[positional].value = arguments[1:]
  elif arguments[1:]:
    raise UsageError(
      f"unexpected argument {arguments[1]!r}: flags start with --"
    )


def _check_values() -> None:
  """Raises UsageError for values that the flag library lets through.

  It compares numbers with their limits, and NaN is beyond none of them. And a
  config file may return anything.
  """
  for name, value in flags.FLAGS.flag_values_dict().items():
    if isinstance(value, float) and math.isnan(value):
      raise UsageError(f"--{name}=nan must be a number")
    if name == "config" and not isinstance(value, config_dict.ConfigDict):
      raise UsageError(
        f"--config={_config_file()}: get_config returns a "
        f"{type(value).__name__}, and must return a ConfigDict"
      )


def _reason(error: Exception) -> str:
  """Returns one line that says why the flags could not be read.

  Args:
    error: Error of the flag library, or of a config file's code.
  """
  lines = str(error).strip().splitlines() or ["no reason given"]
  where = f"--config={_config_file()}: "
  if "does not accept dots in field names" in str(error):
    return (
      f"{where}a plain ConfigDict refuses dotted names in a mapping: begin with"
      " config = experiments.configs.default.sweep()"
    )
  if not isinstance(error, flags.Error):
    return f"{where}{type(error).__name__}: {' '.join(lines)}"
  if len(lines) == 1:
    return lines[0]
  # The flag library quotes a whole traceback; its last line is the reason.
  return f"{where}{lines[-1]}"


def _config_file() -> str:
  """Returns the config file that the command line names."""
  path = str(_DEFAULT_CONFIG)
  for argument, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
    if match := re.fullmatch(r"--?config(?:=(.*))?", argument):
      path = following if match[1] is None else match[1]
  # In --config=file.py:text, the text is an argument of get_config.
  return path.split(":", 1)[0]


def _check_config_file() -> None:
  path = pathlib.Path(_config_file())
  if "config" in flags.FLAGS and not path.is_file():
    raise UsageError(
      f"--config={path} is not a file: use one of experiments/configs/*.py"
    )


def _check_run_field(path: str) -> None:
  from dilocox_jax.checks import check_path
  from dilocox_jax.config import RunConfig

  check_path(RunConfig, path)


def _check_overrides(check_field: Callable[[str], None]) -> None:
  """Raises UsageError if the command line sets an unknown config field."""
  for argument in sys.argv[1:]:
    match = re.match(r"--?(?:no)?config\.([^=]+)", argument)
    if match:
      with usage_errors():
        check_field(match[1])


def define_config(default: pathlib.Path = _DEFAULT_CONFIG) -> None:
  """Defines --config, --config.section.field and --parts."""
  config_flags.DEFINE_config_file(
    "config",
    str(default),
    "Python file with get_config(); set a field with --config.section.field=.",
  )
  own_parts.define_parts()


def define_workdir(more: str = "", needed: str = "required") -> None:
  """Defines --workdir.

  Args:
    more: What else its help says.
    needed: When it is required.
  """
  text = f"Directory of results ({needed}); it is made if missing. {more}"
  flags.DEFINE_string("workdir", None, text.strip())


def run_config(config: config_dict.ConfigDict):
  """Returns the checked config that --config describes.

  Raises:
    UsageError: If the file or a field is wrong.
  """
  from dilocox_jax.config import from_mapping

  kinds = (ValueError, OSError, AttributeError, ImportError)
  with usage_errors("--config: ", kinds):
    return from_mapping(config.to_dict())


def check_files(config) -> None:
  """Checks that the files that a run reads exist, without loading JAX.

  Args:
    config: The checked config of the run.

  Raises:
    UsageError: If no file matches data.glob, or checkpoint.init_from is not
      the directory of a run.
  """
  data, source = config.data, config.checkpoint.init_from
  if data.source == "text_files":
    from dilocox_jax.data.documents import matching_files, split_globs

    with usage_errors("data.glob: "):
      for pattern in split_globs(data.glob):
        matching_files(pattern)
  if source and not (pathlib.Path(source) / "config.json").is_file():
    raise UsageError(
      f"checkpoint.init_from={source} is not a run directory: name the "
      "--workdir of a run that has checkpoints"
    )


def writable(workdir: str | None, program: str) -> pathlib.Path:
  """Makes the work directory and checks that a program may write in it.

  Args:
    workdir: Value of --workdir; None if the flag was not given.
    program: Name of the program, as `work_directory.claim` takes it.

  Returns:
    Path of the work directory.

  Raises:
    UsageError: If --workdir is missing, cannot be written or is not the
      program's.
  """
  if not workdir:
    raise UsageError("--workdir is missing: say where the results should go")
  try:
    path = work_directory.claim(workdir, program)
    with tempfile.TemporaryFile(dir=path):
      return path
  except RefusedError as error:
    raise UsageError(f"--workdir={error}") from error
  except OSError as error:
    raise UsageError(
      f"--workdir={workdir} cannot be written ({error.strerror}): choose"
      " another directory"
    ) from error
