"""Measures in minutes what this project claims of one accelerator.

  python -m experiments.tools.accelerator_check --out=runs/accelerator
  python -m experiments.tools.accelerator_check --out=DIR --wheels=.wheels

It compares methods, codecs and kernels with the reference page and the CPU,
then measures inner steps (beside PyTorch where it is installed), rounds, codecs
and memory, and trains for as long as is left. OUT/accelerator.json has every
figure as soon as it is there, so a run that is cut loses nothing. --wheels is a
folder of packages for a machine without a network; docs/guides/accelerators.md
lists them. On a CPU everything is tiny, and only shows that it works.
"""

import importlib.util
import pathlib
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import app, flags

from experiments.runtime import command_line, workdir_flag

# One row of accelerator.json for each figure.
Figures = Iterator[dict[str, Any]]

_OUT = flags.DEFINE_string("out", "runs/accelerator", "Folder of the figures.")
_WHEELS = flags.DEFINE_string("wheels", None, "Folder of packages to load.")
_MINUTES = flags.DEFINE_float(
  "minutes", 8.0, "Time for everything.", lower_bound=0.1
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Measures, and prints each figure on a line."""
  command_line.refuse_arguments(argv)
  if _WHEELS.value:
    _load_wheels(pathlib.Path(_WHEELS.value))
  folder = workdir_flag.writable(_OUT.value, "accelerator_check")
  start = time.monotonic()
  deadline = start + 60 * _MINUTES.value
  rows: list[dict[str, Any]] = []
  for name, step in _steps(deadline, rows).items():
    run_step(name, step, rows, folder / "accelerator.json")
  failed = [row["figure"] for row in rows if "error" in row]
  print(f"{len(rows)} figures in {time.monotonic() - start:.0f} s: {folder}")
  if failed:
    raise command_line.StoppedError(f"failed: {', '.join(failed)}")


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


def _steps(
  deadline: float, rows: list[dict[str, Any]]
) -> dict[str, Callable[[], Figures]]:
  """Returns the steps of the check by name, the most important first.

  Args:
    deadline: Time of the monotonic clock by which all should have ended.
    rows: The figures so far. PyTorch is compared with them.
  """
  import jax

  from experiments.tools import accelerator_exact as exact
  from experiments.tools import accelerator_speed as speed

  platform = jax.default_backend()
  sizes = speed.TINY if platform == "cpu" else speed.FULL
  attention = {"gpu": "cudnn", "tpu": "splash"}.get(platform, "blockwise")

  def exactness() -> Figures:
    for what, error, bound in exact.errors(attention, sizes.length):
      is_within = error <= bound
      yield {"figure": what, "error_of": error, "bound": bound, "ok": is_within}

  def beside_torch() -> Figures:
    if not importlib.util.find_spec("torch"):
      yield {"figure": "PyTorch", "skipped": "it is not installed"}
      return
    rates = {
      row["figure"].removeprefix("inner step "): row["tokens_per_s"]
      for row in rows
      if "tokens_per_s" in row
    }
    yield from speed.torch_steps(sizes, rates)

  return {
    "exactness": exactness,
    "inner steps": lambda: speed.inner_steps(sizes),
    "PyTorch": beside_torch,
    "rounds and codecs": lambda: speed.ratios(sizes),
    "training": lambda: speed.trained(sizes, deadline),
  }


def _load_wheels(folder: pathlib.Path) -> None:
  """Unpacks the packages of a folder, before anything imports them."""
  target = tempfile.mkdtemp(prefix="wheels_")
  for wheel in sorted(folder.glob("*.whl")):
    zipfile.ZipFile(wheel).extractall(target)
  sys.path.append(target)


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
