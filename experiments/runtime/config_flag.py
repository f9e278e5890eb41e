"""The flag --config: a config file, and flags that set fields of its config.

Example: --config=FILE --config.model.num_layers=4. The file is loaded when the
flags are parsed. A mistake in the file or in a flag ends the program with one
line.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags
from ml_collections import config_dict, config_flags

from dilocox_jax.checks import check_path
from dilocox_jax.config import RunConfig
from experiments.runtime import command_line, parts_flag
from experiments.runtime.command_line import UsageError

# Folder of the config files that come with the programs.
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
_DEFAULT_FILE = CONFIGS / "default.py"

# `ml_collections` quotes some errors of a config file, with their tracebacks,
# in an error of its own that begins like this. The original error is the
# `__context__` of that error.
_QUOTED = "Error whilst parsing config file"

CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "Python file with get_config(); set a field with --config.section.field=.",
)
# A config may name methods or codecs that the user has registered (--parts).
flags.adopt_module_key_flags(parts_flag)


class _ConfigFileParser(flags.ArgumentParser):
  """Loads a config file, and raises `UsageError` if that fails."""

  def __init__(self, parser: flags.ArgumentParser):
    """Stores the parser of `config_flags` that loads the file."""
    super().__init__()
    self._parser = parser

  def parse(self, path: str) -> Any:
    """Returns the `ConfigDict` of FILE, or of FILE:ARGUMENT.

    Raises:
      UsageError: If the file does not exist, or its code raises an error or
        does not return a `ConfigDict`.
    """
    file, _, _ = path.partition(":")
    if not pathlib.Path(file).is_file():
      raise UsageError(
        f"--config={file} is not a file: use one of experiments/configs/*.py"
      )
    try:
      config = self._parser.parse(path)
    # The file is code and may raise anything, or end the program.
    except (Exception, SystemExit) as error:
      raise UsageError(f"--config={file}: {_reason(error)}") from error
    if not isinstance(config, config_dict.ConfigDict):
      raise UsageError(
        f"--config={file}: get_config returns a {type(config).__name__}, and "
        "must return a ConfigDict"
      )
    return config


_flag = flags.FLAGS[CONFIG.name]
_flag.parser = _ConfigFileParser(_flag.parser)


def _reason(error: BaseException) -> str:
  """Returns one line that says why loading a config file raised an error."""
  # Words of an error of `ml_collections`.
  if "does not accept dots in field names" in str(error):
    return (
      "a plain ConfigDict refuses dotted names in a mapping: begin with"
      " config = experiments.configs.default.sweep()"
    )
  cause = error
  if str(error).startswith(_QUOTED):
    cause = error.__context__ or error
  return f"{type(cause).__name__}: {cause}"


def _check_run_field(path: str) -> None:
  """Raises ValueError unless `RunConfig` has the field of this dotted name."""
  check_path(RunConfig, path)


def parse_flags(
  argv: Sequence[str],
  default_file: pathlib.Path = _DEFAULT_FILE,
  check_field: Callable[[str], None] = _check_run_field,
) -> list[str]:
  """Parses the flags of a program that has --config.

  A mistake ends the program with one line (`command_line.one_line_errors`).

  Args:
    argv: The command line, with the path of the program in front.
    default_file: Config file that is loaded if --config is not given.
    check_field: Function (dotted name of a field) that raises ValueError if the
      program's config has no field of this name.

  Returns:
    The path of the program, and the arguments that are no flags.
  """
  command_line.set_up_terminal()
  with command_line.one_line_errors():
    try:
      # Loads the file, unless the command line names another one.
      flags.FLAGS.set_default(CONFIG.name, str(default_file))
      return command_line.read_flags(argv)
    except BrokenPipeError:  # The reader of --help has gone.
      raise
    except UsageError:
      # A field that does not exist has a message with the nearest name.
      _check_fields(argv, check_field)
      raise
    except Exception as error:  # The library raises many kinds for a field.
      _check_fields(argv, check_field)
      raise UsageError(f"--config: {error}") from error


def _check_fields(
  argv: Sequence[str], check_field: Callable[[str], None]
) -> None:
  """Raises UsageError if `argv` sets a config field that does not exist.

  `check_field` raises ValueError for the dotted name of such a field.
  """
  for argument in argv[1:]:
    flag, _, _ = argument.lstrip("-").partition("=")
    name, _, field = flag.partition(".")
    if field and name in (CONFIG.name, f"no{CONFIG.name}"):
      with command_line.usage_errors():
        check_field(field)


def is_given() -> bool:
  """Whether the command line has --config or sets one of its fields."""
  flag = flags.FLAGS[CONFIG.name]
  return bool(flag.present or config_flags.get_override_values(flag))


def file_and_argument() -> tuple[str, str]:
  """Returns FILE and ARGUMENT of --config=FILE:ARGUMENT.

  The argument is "" if there is none.
  """
  path = config_flags.get_config_filename(flags.FLAGS[CONFIG.name])
  file, _, argument = path.partition(":")
  return file, argument
