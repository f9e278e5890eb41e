"""Shows what a run says of itself, as the commands do.

Parts of a run log to the logger of this package. Python shows such lines only
if a program asks for them. `dilocox_jax.train` asks while a run is at work.
"""

import contextlib
import logging
from collections.abc import Iterator

_PACKAGE = "dilocox_jax"
# What these say about each checkpoint would hide the lines of the run.
_TALKATIVE = ("absl", "jax", "orbax")


@contextlib.contextmanager
def shown_progress() -> Iterator[None]:
  """Shows the lines of a run inside the block.

  They go to the handlers that the program has set up, or else to standard
  error. Nothing stays changed after the block.
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
  before = {name: logging.getLogger(name).level for name in levels}
  _set_levels(levels)
  try:
    yield
  finally:
    _set_levels(before)
    if handler:
      logger.removeHandler(handler)


def _set_levels(levels: dict[str, int]) -> None:
  for name, level in levels.items():
    logging.getLogger(name).setLevel(level)
