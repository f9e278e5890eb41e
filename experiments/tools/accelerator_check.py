"""Checks within minutes what this project claims about an accelerator.

  python -m experiments.tools.accelerator_check --out=runs/accelerator
  python -m experiments.tools.accelerator_check --out=DIR --wheels=.wheels

The program compares methods with `dilocox_jax.reference`, codecs and Muon with
the CPU, and fused attention with plain attention. Then it measures inner steps
(and PyTorch's, if PyTorch is installed), rounds, codecs and memory. With the
time that is left it trains a model. Each result is written to
OUT/accelerator.json as soon as it is measured, so a program that is ended early
keeps its results. --wheels is a folder of packages for a machine without a
network (docs/guides/accelerators.md). On a CPU all sizes are tiny, and the
results show only that the program works.
"""

import importlib.util
import pathlib
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from experiments.runtime import command_line, workdir_flag
from experiments.tools.accelerator_figures import Figures, run_step

_OUT = flags.DEFINE_string("out", "runs/accelerator", "Folder of the figures.")
_WHEELS = flags.DEFINE_string("wheels", None, "Folder of packages to load.")
_MINUTES = flags.DEFINE_float(
  "minutes", 8.0, "Time for everything.", lower_bound=0.1
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Runs all steps of the check, and prints each measurement on a line.

  The program fails at the end if a step has raised an error. It does not fail
  if a result differs too much from the expected one: then the line has
  "ok False".
  """
  command_line.refuse_arguments(argv)
  # The flag exists because this program imports its module.
  if workdir_flag.WORKDIR.present:
    raise command_line.UsageError(
      "--workdir is not read here: take --out for the folder of the figures"
    )
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


def _steps(
  deadline: float, rows: list[dict[str, Any]]
) -> dict[str, Callable[[], Figures]]:
  """Returns the steps of the check by name, the most important first.

  The last step trains until about `deadline` (seconds of the monotonic clock).
  The caller adds the results of each step to `rows`. The step "PyTorch" reads
  this project's rates there.
  """
  import jax

  from experiments.tools import accelerator_exact as exact
  from experiments.tools import accelerator_speed as speed

  platform = jax.default_backend()
  sizes = speed.TINY if platform == "cpu" else speed.FULL
  attention = {"gpu": "cudnn", "tpu": "splash"}.get(platform, "blockwise")

  def exactness() -> Figures:
    for name, error, bound in exact.errors(attention, sizes.length):
      is_within = error <= bound
      yield {"figure": name, "error_of": error, "bound": bound, "ok": is_within}

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
  """Unpacks the wheels in a folder, so that their packages can be imported."""
  target = tempfile.mkdtemp(prefix="wheels_")
  for wheel in sorted(folder.glob("*.whl")):
    zipfile.ZipFile(wheel).extractall(target)
  sys.path.append(target)


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
