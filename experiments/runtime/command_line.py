"""What all binaries share at the edge: flags, logging, and short errors.

Bad input ends in one line on standard error and exit code 2, a run that had
to stop in one line and exit code 1, one that was interrupted with 130. Anything
else is a bug and keeps its traceback. Where nothing is wrong but another
process, or the time that was given is over, and the same command goes on, the
exit code is 75, which schedulers may take as "try again".
"""

import logging
import pathlib
import re
import sys
from collections.abc import Callable

from absl import app, flags
from ml_collections import config_dict, config_flags

TRY_AGAIN = 75  # EX_TEMPFAIL in sysexits.h.
INTERRUPTED = 130  # 128 and SIGINT, as shells have it.

_DEFAULT_CONFIG = pathlib.Path(__file__).parent / "configs" / "default.py"

flags.disclaim_key_flags()  # Flags belong to the binary that asks for them.


class UsageError(Exception):
  """Bad input; the message says what to change."""

  exit_code = 2


class StoppedError(Exception):
  """A run that cannot go on; the message says why."""

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
    function: Takes the flags; raises `UsageError` on bad input and
      `StoppedError` where it must give up.
    define_flags: Defines them. Config files are loaded in there.
    check_field: Raises ValueError for a dotted name that --config does not
      have; by default the fields are a run's.
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
  """Prints one line on standard error, after the name of a place."""
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
  except SystemExit:  # Help was asked for and given; absl calls that failure.
    sys.exit(0)
  except UsageError:
    raise
  except Exception as error:  # A config file is code and may raise anything.
    _check_overrides(check_field)
    raise UsageError(_reason(error)) from None
  if positional and arguments[1:]:
    flags.FLAGS[positional].value = arguments[1:]
  elif arguments[1:]:
    raise UsageError(f"unexpected argument {arguments[1]!r}: flags start --")


def _reason(error: Exception) -> str:
  """A flag's own message, or whose code raised what."""
  lines = str(error).strip().splitlines() or ["no reason given"]
  if not isinstance(error, flags.Error):
    lines = [f"{type(error).__name__}: {' '.join(lines)}"]
  elif len(lines) == 1:
    return lines[0]
  return f"--config={_config_file()}: {lines[-1]}"  # Of a quoted traceback.


def _config_file() -> str:
  """The config file that the command line names."""
  named = str(_DEFAULT_CONFIG)
  for argument, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
    if match := re.fullmatch(r"--?config(?:=(.*))?", argument):
      named = following if match[1] is None else match[1]
  return named.split(":", 1)[0]  # What follows a colon goes to get_config.


def _check_config_file() -> None:
  path = pathlib.Path(_config_file())
  if "config" in flags.FLAGS and not path.is_file():
    raise UsageError(
      f"--config={path} is no file: take one of experiments/configs/*.py"
    )


def _check_run_field(path: str) -> None:
  from dilocox_jax.config import RunConfig
  from dilocox_jax.mapping import check_path

  check_path(RunConfig, path)


def _check_overrides(check_field: Callable[[str], None]) -> None:
  """Names the config field on the command line that does not exist."""
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
    "Directory of results; made if missing, continued if it holds a run.",
  )


def run_config(config: config_dict.ConfigDict):
  """The checked config behind --config.

  Raises:
    UsageError: If the file or a field is wrong.
  """
  from dilocox_jax.config import from_mapping

  try:
    return from_mapping(config.to_dict())
  except (ValueError, OSError, AttributeError, ImportError) as error:
    raise UsageError(f"--config: {error}") from error


def writable(workdir: str | None) -> pathlib.Path:
  """Makes the work directory and proves that it can be written.

  Raises:
    UsageError: If it cannot.
  """
  if not workdir:
    raise UsageError("--workdir is missing: say where the results should go")
  path = pathlib.Path(workdir)
  probe = path / ".writable"
  try:
    path.mkdir(parents=True, exist_ok=True)
    probe.touch()
    probe.unlink(missing_ok=True)  # Other processes of the run do the same.
  except OSError as error:
    raise UsageError(
      f"--workdir={workdir} cannot be written ({error.strerror}): take another"
    ) from error
  return path
