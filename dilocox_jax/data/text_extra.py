"""Packages that only some texts need: the extra `text`."""

import importlib
from types import ModuleType


def text_package(name: str, needed_by: str) -> ModuleType:
  """Imports a package of the extra `text`.

  Args:
    name: Name of the package.
    needed_by: What needs it, for the message.

  Raises:
    ValueError: If it is not installed. The message is one line.
  """
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(
      f"{needed_by} needs the package {name}: pip install 'dilocox_jax[text]'"
    ) from error
