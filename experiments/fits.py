r"""Says whether a run fits into its devices: by arithmetic, or by the compiler.

  python -m experiments.fits --memory='80 GB' --config.model.preset=opt_1_3b \
    --config.mesh.layout=mesh --config.mesh.num_stages=4
  python -m experiments.fits --workdir=runs/compiled --compile=v5e:2x2 \
    --config=experiments/configs/compiled.py:tiny_dilocox

No array is allocated, so a laptop can compute the memory of models of any size
on any number of devices. The state that a run keeps between two steps follows
from shapes. The memory that a step needs in addition is an estimate. Tests
compare both with the numbers of compilers.

With --compile the compiler for TPUs or GPUs compiles the trainer's own program,
for devices that this machine need not have. `make compile-report` makes the
environment that TPUs need, and `make compile-report-gpu` the one for GPUs:

  build/gpu/bin/python -m experiments.fits --workdir=runs/compiled \
    --compile=h100:8 --config=experiments/configs/compiled.py:diloco_llama_7b

The program then writes a page that says how much memory a device needs. For
TPUs the page also says what a chip sends between slices (groups of devices with
fast links), and which of these transfers hide behind inner steps.
"""

import math
import os
from collections.abc import Sequence

from absl import app, flags

from dilocox_jax.config import RunConfig
from experiments.runtime import (
  command_line,
  config_flag,
  memory_flag,
  parts_flag,
  run_configs,
  workdir_flag,
)

flags.adopt_module_key_flags(config_flag)
flags.adopt_module_key_flags(memory_flag)
flags.adopt_module_key_flags(workdir_flag)
_COMPILE = flags.DEFINE_string(
  "compile",
  None,
  "Kind and size of a slice, of TPUs (v5e:2x2, v5p:4x4x8), or of GPUs: a100,"
  " h100 or h200, and the number of GPUs (h100:8) or of hosts and of GPUs of"
  " each (h100:4x8). Needs --workdir.",
)
_SLICES = flags.DEFINE_integer(
  "slices", 2, "With --compile: number of slices.", lower_bound=1
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Prints what a run needs, by arithmetic or by the compiler."""
  command_line.refuse_arguments(argv)
  parts_flag.register()
  topology = _COMPILE.value
  command_line.refuse_unused(
    workdir_flag.WORKDIR, _SLICES, is_used=bool(topology), needs="--compile"
  )
  command_line.refuse_unused(
    memory_flag.MEMORY, is_used=not topology, needs="no --compile"
  )
  config = run_configs.run_config(config_flag.CONFIG.value)
  memory_bytes = memory_flag.memory_bytes()
  if topology:
    _compile(config, topology)
  else:
    _estimate(config, math.inf if memory_bytes is None else memory_bytes)


def _estimate(config: RunConfig, memory_bytes: float) -> None:
  """Prints what a run needs by arithmetic.

  `memory_bytes` is the memory of a device; infinity if it is not known. Raises
  StoppedError if the run needs more.
  """
  from dilocox_jax.api.memory_advice import memory_advice
  from dilocox_jax.config.device_memory import LEAST_SPARE, device_memory
  from dilocox_jax.plan.model import shapes
  from dilocox_jax.report.units import human_bytes, human_share

  _print_parameters(config)
  flops = shapes.flops_per_token(
    config.model.shape, config.data.sequence_length
  )
  print(
    f"{flops:.4g} FLOPs a token of training (L = {config.data.sequence_length})"
  )
  memory = device_memory(config, memory_bytes)
  # `memory` is for one replica. With the layout "stacked", all replicas of this
  # program are on one device.
  num_stacked = 1
  if config.mesh.layout != "mesh":
    num_stacked = config.num_local_replicas
  kept_bytes = num_stacked * memory.state
  step_bytes = num_stacked * memory.step
  needed_bytes = memory.frozen + kept_bytes + step_bytes
  batch = f"{config.data.batch_size} x {config.data.sequence_length} tokens"
  _print_table(
    ("on a device", "memory"),
    [
      ("frozen, for all replicas (derived)", human_bytes(memory.frozen)),
      ("kept between steps (derived)", human_bytes(kept_bytes)),
      (f"a step of {batch} (estimated)", human_bytes(step_bytes)),
      ("needed", human_bytes(needed_bytes)),
    ],
  )
  if not math.isfinite(memory_bytes):
    print("--memory='80 GB' would say whether it fits")
    return
  spare = human_share(abs(1 - needed_bytes / memory_bytes))
  available = human_bytes(memory_bytes)
  if needed_bytes > memory_bytes:
    raise command_line.StoppedError(
      f"does not fit: it lacks {spare} of {available}; "
      f"{memory_advice(config, memory_bytes)}"
    )
  print(f"fits with {spare} of {available} to spare")
  if needed_bytes > (1 - LEAST_SPARE) * memory_bytes:
    print(
      f"but {human_bytes(step_bytes)} of it are an estimate, which may be "
      f"wrong: {100 * LEAST_SPARE:.0f} % should be left"
    )


def _print_parameters(config: RunConfig) -> None:
  """Prints shape and number of parameters of every leaf, and the totals."""
  trained_shapes = config.trained_shapes
  all_shapes = config.model.shape.parameter_shapes
  rows = []
  for path, shape in {**all_shapes, **trained_shapes}.items():
    rows.append((path, str(shape), f"{math.prod(shape):,}"))
  num_all = sum(math.prod(shape) for shape in all_shapes.values())
  num_trained = sum(math.prod(shape) for shape in trained_shapes.values())
  rows.append(("all", "", f"{num_all:,}"))
  rows.append(("trained", "", f"{num_trained:,}"))
  _print_table(("leaf", "shape", "parameters"), rows, text_columns=(0, 1))


def _print_table(
  header: Sequence[str],
  rows: Sequence[Sequence[str]],
  text_columns: Sequence[int] = (0,),
) -> None:
  """Prints a table whose `text_columns` are aligned on the left."""
  from rich.console import Console

  from dilocox_jax.report.tables import terminal_table

  Console().print(terminal_table(header, rows, text_columns))


def _compile(config: RunConfig, topology: str) -> None:
  """Compiles a run for absent devices, and writes the page.

  `topology` is the kind and size of a slice, a group of devices with fast links
  between them, e.g. "v5e:2x2". Raises StoppedError if the program does not fit
  into a device.
  """
  # Programs are compiled for slices that are not there. So JAX must not look
  # for real ones.
  os.environ["JAX_PLATFORMS"] = "cpu"
  from dilocox_jax.api.memory_advice import memory_advice
  from experiments.tools import compiled_run

  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "fits")
  with command_line.usage_errors():
    compiled = compiled_run.compiled_run(config, topology, _SLICES.value)
  page = compiled_run.write_compiled(
    compiled, workdir, command_line.typed_command()
  )
  print(f"{compiled.name}: {compiled.finding}\nreport: {page}")
  if not compiled.fits:
    raise command_line.StoppedError(
      f"{compiled.name} does not fit: "
      f"{memory_advice(config, compiled.memory_bytes)}"
    )


if __name__ == "__main__":
  app.run(main, flags_parser=config_flag.parse_flags)
