"""Writes `dilocox_jax/__init__.pyi`, from which editors know the public names.

  python -m tests.contracts.api_stub

The names of `dilocox_jax` are loaded at their first use, and the eleven methods
are built from a table, so a type checker cannot read either of them in the
code. The stub imports each name from the module that defines it, and has one
function for each method.
"""

import inspect
import pathlib
import re
import subprocess
import sys
import textwrap

import dilocox_jax as dx
from dilocox_jax.plan.schedule.methods import METHODS

STUB = pathlib.Path(dx.__file__).with_suffix(".pyi")
_HEAD = '''\
"""Public names of `dilocox_jax`, for editors and type checkers.

`make stubs` writes this file, and a test compares it with the code.
"""

from collections.abc import Callable

from optax import GradientTransformation, GradientTransformationExtraArgs

from dilocox_jax.plan.schedule.fragments import Fragments
'''
_MODULE_PATH = re.compile(r"(?<!\w)(?:[a-z_]\w*\.)+(?=\w)")


def stub() -> str:
  """Returns the content of the stub."""
  parts = [
    _HEAD,
    *imports(),
    "\n__version__: str\n",
    f"__all__ = {sorted(dx.__all__)}\n",
    *map(function, sorted(set(dx.__all__) & set(METHODS))),
  ]
  return formatted("\n".join(parts))


def imports() -> list[str]:
  """Returns an import for every name that a module of the package defines."""
  return [
    f"from {getattr(dx, name).__module__} import {name} as {name}"
    for name in dx.__all__
    if name not in METHODS
  ]


def function(name: str) -> str:
  """Returns the declaration of a method's transform, with its docstring.

  Args:
    name: Name of the method.
  """
  make = getattr(dx, name)
  # Annotations name classes by their modules; the stub imports the classes.
  signature = _MODULE_PATH.sub("", str(inspect.signature(make)))
  docstring = textwrap.indent(f'"""{make.__doc__}\n"""', "  ")
  return f"def {name}{signature}:\n{docstring}\n"


def formatted(text: str) -> str:
  """Returns Python code in the house style, with sorted imports."""
  ruff = [sys.executable, "-m", "ruff"]
  where = ["--stdin-filename", str(STUB), "-"]
  for command in (["check", "--select", "I", "--fix", "--quiet"], ["format"]):
    text = subprocess.run(
      [*ruff, *command, *where],
      input=text,
      stdout=subprocess.PIPE,
      text=True,
      check=True,
    ).stdout
  return text


if __name__ == "__main__":
  STUB.write_text(stub())
