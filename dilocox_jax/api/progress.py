"""Shows how far a run is that was started from Python.

A run logs to the logger of this package. Python shows such lines only if a
program asks for them. `dilocox_jax.train` asks for them while it trains. In a
terminal and in a notebook a bar takes the place of the lines about progress.
"""

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator

from rich.console import Console

_PACKAGE = "dilocox_jax"
# These packages log many lines about checkpoints, among which the lines of the
# run would be lost. Only their warnings are shown.
_TALKATIVE = ("absl", "jax", "orbax")


def bar_console() -> Console | None:
  """Returns the terminal or the notebook that can show a progress bar.

  Returns:
    The console. None if standard error is a file or a pipe, if the terminal
    cannot move its cursor, or if the notebook lacks the package ipywidgets,
    which a bar needs there.
  """
  console = Console(stderr=True)
  if console.is_jupyter:
    has_widgets = importlib.util.find_spec("ipywidgets") is not None
    return console if has_widgets else None
  if console.is_dumb_terminal or not sys.stderr.isatty():
    return None
  return console


@contextlib.contextmanager
def shown_progress() -> Iterator[None]:
  """Shows the log lines of a run while the block runs.

  The lines go to the handlers that the program has set up. If there are none,
  they go to standard error. After the block everything is as before.
  """
  logger = logging.getLogger(_PACKAGE)
  handler = None
  if not _has_handlers_of_program(logger):
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
  propagated_before = logger.propagate
  logger.propagate = propagated_before and handler is None
  levels = {_PACKAGE: min(logger.level or logging.INFO, logging.INFO)}
  for name in _TALKATIVE:
    levels[name] = max(logging.getLogger(name).level, logging.WARNING)
  levels_before = {name: logging.getLogger(name).level for name in levels}
  _set_levels(levels)
  try:
    yield
  finally:
    _set_levels(levels_before)
    logger.propagate = propagated_before
    if handler:
      logger.removeHandler(handler)


def _has_handlers_of_program(logger: logging.Logger) -> bool:
  """Whether the program has set up a handler for the lines of a logger.

  When Orbax is imported, absl sets up a handler with the default format of
  Python, so such a handler does not count. It would put the level and the name
  of a module in front of each line.
  """
  handlers = [*logger.handlers, *logging.getLogger().handlers]
  return any(
    handler.formatter is None or handler.formatter._fmt != logging.BASIC_FORMAT
    for handler in handlers
  )


def _set_levels(levels: dict[str, int]) -> None:
  """Sets the levels of loggers, given by name."""
  for name, level in levels.items():
    logging.getLogger(name).setLevel(level)
