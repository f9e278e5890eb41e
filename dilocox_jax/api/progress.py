"""Shows the progress of a run that was started from Python.

A run writes lines to the logger `dilocox_jax`, which Python does not show by
itself. In a terminal, and in a notebook with ipywidgets, a bar takes the place
of the lines about progress.
"""

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Iterator

from rich.console import Console

_PACKAGE = "dilocox_jax"
# These packages log so many lines about checkpoints that the lines of the run
# would be lost among them. Only their warnings are shown.
_TALKATIVE = ("absl", "jax", "orbax")


def bar_console() -> Console | None:
  """Returns a console for a progress bar: standard error, or a notebook's.

  The result is None if no bar can be shown: standard error is a file or a pipe,
  the terminal cannot move its cursor, or the notebook lacks ipywidgets.
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
  """Shows the log lines of a run inside a `with` statement.

  The lines go to the logging handlers that the program has set up. If there are
  none, the lines go to standard error. At the end, all levels and handlers are
  set back.
  """
  logger = logging.getLogger(_PACKAGE)
  handler = None
  if not _has_handlers_of_program(logger):
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
  propagated_before = logger.propagate
  # The root logger might show the lines a second time.
  logger.propagate = propagated_before and handler is None
  # The level 0 means that none is set.
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
  """Returns whether the user's program has set up a handler for a logger.

  A handler of the root logger also counts. No handler with Python's default
  format counts.
  """
  handlers = [*logger.handlers, *logging.getLogger().handlers]
  # A handler with Python's default format does not count: Orbax imports absl,
  # which sets up one that would put the level in front of each line.
  return any(
    handler.formatter is None or handler.formatter._fmt != logging.BASIC_FORMAT
    for handler in handlers
  )


def _set_levels(levels: dict[str, int]) -> None:
  """Sets the levels of some loggers, given by name."""
  for name, level in levels.items():
    logging.getLogger(name).setLevel(level)
