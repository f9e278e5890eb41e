"""Gives all binaries the same flags, logging and errors of one line.

Exit codes, each with one line on standard error:

  1    a run had to stop
  2    the input is bad
  75   another process is in the way or was lost, or the given time is over;
       schedulers may start the same command again, and the run continues
  130  Ctrl-C stopped the run (128 + the number of the signal, as in shells)
  143  SIGTERM stopped the run

Any other error is a bug, and its traceback is printed.
"""

import glob
import logging
import os
import pathlib
import re
import sys
from collections.abc import Callable

from absl import app, flags
from ml_collections import config_dict, config_flags

TRY_AGAIN = 75  # EX_TEMPFAIL in sysexits.h.
INTERRUPTED = 130  # 128 + SIGINT, as in shells.

_DEFAULT_CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "default.py"

flags.disclaim_key_flags()  # Flags belong to the binary that asks for them.


class UsageError(Exception):
  """Says what is wrong with the input, and what to change."""

  exit_code = 2


class SavedAndStoppedError(Exception):
  """Ends a run that saved and stopped because a signal asked it to."""

  def __init__(self, message: object, stop_signal: int):
    """Takes one line for the user, and the number of the signal."""
    super().__init__(message)
    self.exit_code = 128 + stop_signal  # As in shells.


class StoppedError(Exception):
  """Says why a run cannot continue."""

  def __init__(self, message: object, exit_code: int = 1):
    super().__init__(message)
    self.exit_code = exit_code


def main(
  function: Callable[[flags.FlagValues], None],
  define_flags: Callable[[], None],
  check_field: Callable[[str], None] | None = None,
  positional: str = "",
) -> None:
  """Runs a binary.

  Args:
    function: Function that is called with the flags. It raises `UsageError` on
      bad input and `StoppedError` if the run cannot continue.
    define_flags: Function that defines the flags and loads config files.
    check_field: Function that raises ValueError for a dotted name that is not a
      field of --config. By default the fields are those of a run.
    positional: Name of a multi-string flag that takes the arguments without
      dashes; "" if the binary has no such arguments.
  """
  logging.basicConfig(format="%(message)s", level=logging.INFO)
  for loud in ("absl", "jax", "orbax"):
    logging.getLogger(loud).setLevel(logging.WARNING)
  try:
    _parse(define_flags, check_field or _check_run_field, positional)
    function(flags.FLAGS)
  except (UsageError, StoppedError) as error:
    print_error(error)
    sys.exit(error.exit_code)
  except SavedAndStoppedError as request:
    print(request, file=sys.stderr)
    sys.exit(request.exit_code)
  except KeyboardInterrupt:
    print_error(StoppedError("interrupted"))
    sys.exit(INTERRUPTED)
  except RuntimeError as error:
    from dilocox_jax.metrics import RecordError

    if not isinstance(error, RecordError):
      raise  # A bug, so its traceback is wanted.
    print_error(error)
    sys.exit(1)


def print_error(error: Exception, where: str = "") -> None:
  """Prints an error as one line on standard error, after the text `where`."""
  print(f"error: {where}{' '.join(str(error).split())}", file=sys.stderr)


def _parse(
  define_flags: Callable[[], None],
  check_field: Callable[[str], None],
  positional: str,
) -> None:
  try:
    app.define_help_flags()
    define_flags()
    _check_config_file()
    arguments = flags.FLAGS(sys.argv)
  except SystemExit:  # absl printed the help and would exit with a failure.
    sys.exit(0)
  except UsageError:
    raise
  except Exception as error:  # A config file is code and may raise anything.
    _check_overrides(check_field)
    raise UsageError(_reason(error)) from None
  if positional and arguments[1:]:
    flags.FLAGS[positional].value = arguments[1:]
  elif arguments[1:]:
    raise UsageError(
      f"unexpected argument {arguments[1]!r}: flags begin with --"
    )


def _reason(error: Exception) -> str:
  """Returns one line about a wrong flag or an error in a config file's code."""
  lines = str(error).strip().splitlines() or ["no reason given"]
  if not isinstance(error, flags.Error):
    lines = [f"{type(error).__name__}: {' '.join(lines)}"]
  elif len(lines) == 1:
    return lines[0]
  # The flag library quotes a traceback, whose last line is the error.
  return f"--config={_config_file()}: {lines[-1]}"


def _config_file() -> str:
  """Returns the config file that the command line names."""
  named = str(_DEFAULT_CONFIG)
  for argument, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
    if match := re.fullmatch(r"--?config(?:=(.*))?", argument):
      named = following if match[1] is None else match[1]
  return named.split(":", 1)[0]  # What follows a colon goes to get_config.


def _check_config_file() -> None:
  path = pathlib.Path(_config_file())
  if "config" in flags.FLAGS and not path.is_file():
    raise UsageError(
      f"--config={path} is not a file: take one of experiments/configs/*.py"
    )


def _check_run_field(path: str) -> None:
  from dilocox_jax.config import RunConfig
  from dilocox_jax.mapping import check_path

  check_path(RunConfig, path)


def _check_overrides(check_field: Callable[[str], None]) -> None:
  """Raises UsageError for a field on the command line that does not exist."""
  for argument in sys.argv[1:]:
    match = re.match(r"--?(?:no)?config\.([\w.]+)", argument)
    try:
      if match:
        check_field(match[1])
    except ValueError as error:
      raise UsageError(error) from None


def define_config(default: pathlib.Path = _DEFAULT_CONFIG) -> None:
  """Defines --config and --config.section.field."""
  config_flags.DEFINE_config_file(
    "config",
    str(default),
    "Python file with get_config(); set a field with --config.section.field=.",
  )


def define_workdir() -> None:
  """Defines --workdir."""
  flags.DEFINE_string(
    "workdir",
    None,
    "Directory of results; created if missing. If it holds a run, that run is "
    "continued.",
  )


def run_config(config: config_dict.ConfigDict):
  """Returns the checked config that --config describes.

  Raises:
    UsageError: If the file or a field is wrong.
  """
  from dilocox_jax.config import from_mapping

  try:
    return from_mapping(config.to_dict())
  except (ValueError, OSError, AttributeError, ImportError) as error:
    raise UsageError(f"--config: {error}") from error


def check_files(config) -> None:
  """Checks that the files that a run reads exist, without loading JAX.

  Args:
    config: The checked config of the run.

  Raises:
    UsageError: If no file matches data.glob, or checkpoint.init_from is not
      the directory of a run.
  """
  data, source = config.data, config.checkpoint.init_from
  pattern = os.path.expanduser(data.glob)
  matches = glob.iglob(pattern, recursive=True)
  if data.source == "text_files" and not any(map(os.path.isfile, matches)):
    raise UsageError(
      f"no file matches data.glob={data.glob!r}: give a pattern of existing "
      "files, for example 'texts/**/*.txt'"
    )
  if source and not (pathlib.Path(source) / "config.json").is_file():
    raise UsageError(
      f"checkpoint.init_from={source} is not a run directory: name the "
      "--workdir of a run that has checkpoints"
    )


def writable(workdir: str | None) -> pathlib.Path:
  """Creates the work directory and checks that it can be written.

  Args:
    workdir: Value of --workdir; None or "" if the flag is missing.

  Returns:
    Path of the directory.

  Raises:
    UsageError: If the flag is missing or the directory cannot be written.
  """
  if not workdir:
    raise UsageError("--workdir is missing: say where the results should go")
  path = pathlib.Path(workdir)
  probe = path / ".writable"
  try:
    path.mkdir(parents=True, exist_ok=True)
    probe.touch()
    probe.unlink(missing_ok=True)  # Other processes may do the same.
  except OSError as error:
    raise UsageError(
      f"--workdir={workdir} cannot be written ({error.strerror}): give a "
      "directory in which you may create files"
    ) from error
  return path
