r"""Says whether a run fits into its devices: by arithmetic, or by the compiler.

  python -m experiments.fits --memory='80 GB' --config.model.preset=opt_1_3b \
    --config.mesh.layout=mesh --config.mesh.num_stages=4
  python -m experiments.fits --workdir=runs/compiled --compile=v5e:2x2 \
    --config=experiments/configs/compiled.py:tiny_dilocox

Nothing is allocated, so models of any size and meshes of any number of devices
can be looked at on a laptop. What a run keeps between two steps follows from
shapes; what a step needs beside it is an estimate. Tests hold both to the
compiler's numbers. With --compile the TPU's compiler works on the trainer's own
program, for slices that need not be there (`make compile-report` makes the
environment that this needs). Its page says how much memory a chip needs, what
it sends between slices, and which transfers hide behind inner steps.
"""

import math

from absl import flags

from dilocox_jax.config import RunConfig
from experiments.runtime import command_line


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_config()
  command_line.define_workdir(needed="required by --compile")
  flags.DEFINE_string("memory", None, "Memory of a device, e.g. '80 GB'.")
  flags.DEFINE_string(
    "compile", None, "Kind and size of a TPU slice, e.g. v5e:2x2 or v5p:4x4x8."
  )
  flags.DEFINE_integer("slices", 2, "Number of slices.", lower_bound=1)


def main(values: flags.FlagValues) -> None:
  """Prints the tables, and compiles if asked to."""
  is_compiled = bool(values.compile)
  command_line.refuse_unused(
    values, [(name, is_compiled, "--compile") for name in ("workdir", "slices")]
  )
  config = command_line.run_config(values.config)
  memory_bytes = command_line.memory_bytes(values) or math.inf
  if is_compiled:
    _compile(config, values)
  else:
    _estimate(config, memory_bytes)


def _estimate(config: RunConfig, memory_bytes: float) -> None:
  from rich.console import Console

  from dilocox_jax.api.device_memory import LEAST_SPARE, device_memory
  from dilocox_jax.plan.model import shapes
  from dilocox_jax.report.tables import terminal_table
  from dilocox_jax.report.units import human_bytes, human_share

  shape, length = config.model.shape, config.data.sequence_length
  trained, whole = config.trained_shapes, shape.parameter_shapes
  leaves = {**whole, **trained}
  rows = [(p, str(x), f"{math.prod(x):,}") for p, x in leaves.items()]
  for name, summed in {"all": whole, "trained": trained}.items():
    rows.append((name, "", f"{sum(map(math.prod, summed.values())):,}"))
  console, header = Console(), ("leaf", "shape", "parameters")
  console.print(terminal_table(header, rows, (0, 1)))
  flops = shapes.flops_per_token(shape, length)
  print(f"{flops:.4g} FLOPs a token of training (L = {length})")
  stacked = 1 if config.mesh.layout == "mesh" else config.num_local_replicas
  memory = device_memory(config)
  own, has = memory.state + memory.step, human_bytes(memory_bytes)
  needed = memory.frozen + stacked * own
  batch = f"{config.data.batch_size} x {length} tokens"
  sizes = {
    "frozen, for all replicas (derived)": memory.frozen,
    "kept between steps (derived)": stacked * memory.state,
    f"a step of {batch} (estimated)": stacked * memory.step,
    "needed": needed,
  }
  cells = [(name, human_bytes(size)) for name, size in sizes.items()]
  console.print(terminal_table(("on a device", "memory"), cells))
  if not math.isfinite(memory_bytes):
    print("--memory='80 GB' would say whether it fits")
    return
  spare = human_share(abs(1 - needed / memory_bytes))
  if needed > memory_bytes:
    raise command_line.StoppedError(
      f"does not fit: it lacks {spare} of {has}; take more stages or data"
      " shards, a smaller batch or rank, or mesh.remat='full'"
    )
  print(f"fits with {spare} of {has} to spare")
  if needed > (1 - LEAST_SPARE) * memory_bytes:
    estimated = human_bytes(stacked * memory.step)
    least = f"{100 * LEAST_SPARE:.0f} %"
    print(
      f"but {estimated} of it are an estimate, which may be wrong: {least} "
      "should be left"
    )


def _compile(config: RunConfig, values: flags.FlagValues) -> None:
  """Compiles, writes the page and prints where it is."""
  import os

  # The slices are only compiled for; nothing may look for a real one.
  os.environ["JAX_PLATFORMS"] = "cpu"
  from experiments.tools import compiled_run

  workdir = command_line.writable(values.workdir, "fits")
  with command_line.usage_errors():
    compiled = compiled_run.compiled_run(config, values.compile, values.slices)
  page = compiled_run.write_compiled(
    compiled, workdir, command_line.own_command()
  )
  print(f"{compiled.name}: {compiled.finding}\nreport: {page}")
  if not compiled.fits:
    raise command_line.StoppedError(
      f"{compiled.name} does not fit: take more stages or data shards, a "
      "smaller batch or rank, or mesh.remat='full'"
    )


if __name__ == "__main__":
  command_line.main(main, define_flags)
