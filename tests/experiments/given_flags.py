"""Flags of a program that is called in this process."""

import types
from typing import Any


class _Given(types.SimpleNamespace):
  def __getitem__(self, name: str) -> Any:
    return types.SimpleNamespace(value=getattr(self, name, None), present=0)


def given(**values: Any) -> Any:
  """Values of flags, none of which counts as given on a command line."""
  return _Given(**values)
