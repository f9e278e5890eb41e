"""Writes each figure (result) of an accelerator as soon as it is measured.

A *figure* is a dict with the name of a measurement and its results, or with the
error that it raised.
"""

import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

# Rows of accelerator.json, each a figure.
Figures = Iterator[dict[str, Any]]


def run_step(
  name: str,
  step: Callable[[], Figures],
  rows: list[dict[str, Any]],
  path: pathlib.Path,
) -> None:
  """Runs a step of a check, and writes and prints each result immediately.

  A result is a *figure*: a dict. If the step raises an error, the error becomes
  its last figure.

  Args:
    name: Name of the step.
    step: Function that measures and yields the figures.
    rows: All figures so far. The function adds the figures of the step.
    path: JSON file to which all figures are written after each of them.

  Raises:
    RecordError: If the file cannot be written.
  """
  from dilocox_jax.metrics.lines import write_json

  start = time.monotonic()
  figures = step()
  while True:
    try:
      row = next(figures, None)
    except Exception as error:  # noqa: BLE001 - other steps can still succeed.
      row = {"figure": name, "error": f"{type(error).__name__}: {error}"[:500]}
      figures = iter(())  # No figure follows the error.
    if row is None:
      return
    rows.append(row | {"after_s": round(time.monotonic() - start, 1)})
    write_json(path, {**_device(), "label": "measured", "figures": rows})
    print("  ".join(f"{k} {_short(v)}" for k, v in row.items()), flush=True)


def _short(value: Any) -> str:
  """Returns a value as text. A float has at most four digits."""
  return f"{value:.4g}" if isinstance(value, float) else str(value)


def _device() -> dict[str, Any]:
  """Returns the device, its platform, and versions of Python and packages."""
  import flax
  import jax
  import optax

  return {
    "device": jax.devices()[0].device_kind,
    "platform": jax.default_backend(),
    "python": sys.version.split()[0],
    "versions": {m.__name__: m.__version__ for m in (jax, flax, optax)},
  }
