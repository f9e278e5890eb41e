"""Packages that only some texts need: the extras `text` and `hf`."""

import importlib
from types import ModuleType


def text_package(name: str, needed_by: str, extra: str = "text") -> ModuleType:
  """Imports a package of an extra.

  Args:
    name: Name of the package.
    needed_by: What needs it, for the message.
    extra: Name of the extra.

  Raises:
    ValueError: If it is not installed. The message is one line.
  """
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise ValueError(
      f"{needed_by} needs the package {name}: "
      f"pip install 'dilocox_jax[{extra}]'"
    ) from error
