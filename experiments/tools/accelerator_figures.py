"""Writes the figures of an accelerator as they are measured."""

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
  """Writes the figures of a step as they come; an error is one of them.

  Args:
    name: Name of the step.
    step: Yields the figures.
    rows: All figures so far, to which those of the step are added.
    path: File to which all figures are written after each of them.
  """
  from dilocox_jax.metrics.lines import write_json

  start = time.monotonic()
  figures = step()
  while True:
    try:
      row = next(figures, None)
    except Exception as error:  # noqa: BLE001 - the others can still be had.
      row = {"figure": name, "error": f"{type(error).__name__}: {error}"[:500]}
      figures = iter(())
    if row is None:
      return
    rows.append(row | {"after_s": round(time.monotonic() - start, 1)})
    write_json(path, {**_device(), "label": "measured", "figures": rows})
    print("  ".join(f"{k} {_short(v)}" for k, v in row.items()), flush=True)


def _short(value: Any) -> str:
  return f"{value:.4g}" if isinstance(value, float) else str(value)


def _device() -> dict[str, Any]:
  import flax
  import jax
  import optax

  return {
    "device": jax.devices()[0].device_kind,
    "platform": jax.default_backend(),
    "python": sys.version.split()[0],
    "versions": {m.__name__: m.__version__ for m in (jax, flax, optax)},
  }
