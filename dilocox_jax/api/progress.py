"""Shows the log lines of a run that was started from Python.

A run logs to the logger of this package. Python shows such lines only if a
program asks for them. `dilocox_jax.train` asks for them while it trains.
"""

import contextlib
import logging
from collections.abc import Iterator

_PACKAGE = "dilocox_jax"
# These packages log many lines about checkpoints, among which the lines of the
# run would be lost. Only their warnings are shown.
_TALKATIVE = ("absl", "jax", "orbax")


@contextlib.contextmanager
def shown_progress() -> Iterator[None]:
  """Shows the log lines of a run while the block runs.

  The lines go to the handlers that the program has set up. If there are none,
  they go to standard error. After the block everything is as before.
  """
  logger = logging.getLogger(_PACKAGE)
  handler = None
  if not logger.hasHandlers():
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
  levels = {_PACKAGE: min(logger.level or logging.INFO, logging.INFO)}
  for name in _TALKATIVE:
    levels[name] = max(logging.getLogger(name).level, logging.WARNING)
  levels_before = {name: logging.getLogger(name).level for name in levels}
  _set_levels(levels)
  try:
    yield
  finally:
    _set_levels(levels_before)
    if handler:
      logger.removeHandler(handler)


def _set_levels(levels: dict[str, int]) -> None:
  """Sets the levels of loggers, given by name."""
  for name, level in levels.items():
    logging.getLogger(name).setLevel(level)
