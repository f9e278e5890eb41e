"""Running the trainer from a binary: devices, compilation cache, errors."""

import contextlib
import os
import pathlib
import shlex
import sys

import jax
from rich.console import Console

from dilocox_jax import report
from dilocox_jax.checkpoint import RefusedError
from dilocox_jax.clock import Clock
from dilocox_jax.config import RunConfig
from dilocox_jax.metrics import RecordError
from dilocox_jax.trainer import Trainer, TrainingStoppedError
from experiments.command_line import StoppedError, UsageError

CACHE_VARIABLE = "DILOCOX_JAX_CACHE"
_DEFAULT_CACHE = "~/.cache/dilocox_jax"


def set_up_jax(num_cpu_devices: int = 1) -> None:
  """Chooses devices and the compilation cache before JAX starts.

  Programs compiled once are kept in $DILOCOX_JAX_CACHE, or in the user's
  cache directory; an empty value turns that off.

  Args:
    num_cpu_devices: Devices that a CPU stands for.
  """
  if num_cpu_devices > 1:
    jax.config.update("jax_num_cpu_devices", num_cpu_devices)
  cache = os.environ.get(CACHE_VARIABLE, _DEFAULT_CACHE)
  if cache:
    path = str(pathlib.Path(cache).expanduser())
    jax.config.update("jax_compilation_cache_dir", path)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def train(
  config: RunConfig,
  workdir: pathlib.Path,
  *,
  profile: bool = False,
  clock: Clock | None = None,
) -> pathlib.Path:
  """Trains one run to its end and prints its table.

  Args:
    config: What to run.
    workdir: The run directory.
    profile: Whether to write a profiler trace to workdir/profile.
    clock: Says what the run would have cost elsewhere.

  Returns:
    Path of the report.

  Raises:
    UsageError: If the run cannot be set up as asked.
    StoppedError: If it had to stop.
  """
  is_mesh = config.mesh.layout == "mesh"
  set_up_jax(config.mesh.num_replicas if is_mesh else 1)
  command = shlex.join(["python", "-m", *_module_and_arguments()])
  try:
    trainer = Trainer(config, workdir, command, clock)
  except ValueError as error:
    raise UsageError(str(error)) from error
  tracing = contextlib.nullcontext()
  if profile:
    tracing = _trace(workdir / "profile")
  try:
    with tracing:
      path = trainer.run()
  except RefusedError as error:
    raise UsageError(str(error)) from error
  except (TrainingStoppedError, RecordError, OSError) as error:
    raise StoppedError(str(error)) from error
  report.print_table([report.load_run(workdir)], Console())
  print(f"report: {path}")
  return path


def _trace(directory: pathlib.Path) -> contextlib.AbstractContextManager:
  options = jax.profiler.ProfileOptions()
  # Every Python call of the compiler would make a trace a hundred times larger.
  options.python_tracer_level = 0
  return jax.profiler.trace(str(directory), profiler_options=options)


def _module_and_arguments() -> list[str]:
  """The command line as one would type it in the checkout."""
  script = pathlib.Path(sys.argv[0])
  return [f"{script.parent.name}.{script.stem}", *sys.argv[1:]]
