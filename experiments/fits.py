r"""Says whether a run fits into its devices: by arithmetic, or by the compiler.

  python -m experiments.fits --memory='80 GB' --config.model.preset=opt_1_3b \
    --config.mesh.layout=mesh --config.mesh.num_stages=4
  python -m experiments.fits --workdir=runs/compiled --compile=v5e:2x2 \
    --config=experiments/configs/compiled.py:tiny_dilocox

Nothing is allocated, so models of any size and meshes of any number of devices
can be looked at on a laptop. What a run keeps between two steps is exact; what
a step needs beside it is an estimate, which a test holds to the compiler's
numbers. With --compile the TPU's compiler works on the trainer's own program,
for slices that need not be there (`make compile-report` makes the environment
that this needs). Its page says how much memory a chip needs, what it sends
between slices, and which transfers hide behind inner steps.
"""

import math
import pathlib
from collections.abc import Iterator

from absl import flags

from experiments.runtime import command_line


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_config()
  command_line.define_workdir("Only --compile writes into it.")
  flags.DEFINE_string("memory", None, "Memory of a device, e.g. '80 GB'.")
  flags.DEFINE_string(
    "compile", None, "Kind and size of a TPU slice, e.g. v5e:2x2 or v5p:4x4x8."
  )
  flags.DEFINE_integer("slices", 2, "Number of slices.", lower_bound=1)
  flags.DEFINE_string(
    "table", None, "CSV file to write: memory of all reports beside --workdir."
  )


def main(values: flags.FlagValues) -> None:
  """Prints the tables, and compiles if asked to."""
  is_compiled = bool(values.compile)
  command_line.refuse_unused(
    values,
    [
      (name, is_compiled, "--compile")
      for name in ("workdir", "slices", "table")
    ],
  )
  from dilocox_jax.simulate.quantities import SIZE, parse_quantity

  config = command_line.run_config(values.config)
  memory_bytes = math.inf
  with command_line.usage_errors():
    if values.memory:
      memory_bytes = parse_quantity(values.memory, SIZE, "--memory")
  if is_compiled:
    _compile(config, values)
  else:
    _estimate(config, memory_bytes)


def _estimate(config, memory_bytes: float) -> None:
  from rich.console import Console

  from dilocox_jax.api.device_memory import step_bytes
  from dilocox_jax.plan.model import shapes
  from dilocox_jax.report.tables import terminal_table
  from dilocox_jax.report.units import human_bytes, human_share

  shape, length = config.model.shape, config.data.sequence_length
  leaves = shapes.parameter_shapes(shape)
  rows = [(p, str(x), f"{math.prod(x):,}") for p, x in leaves.items()]
  rows.append(("all", "", f"{shapes.parameter_count(shape):,}"))
  console = Console()
  header = ("leaf", "shape", "parameters")
  console.print(terminal_table(header, rows, (0, 1)))
  flops = shapes.flops_per_token(shape, length)
  print(f"{flops:.4g} FLOPs a token of training (L = {length})")
  with command_line.usage_errors():
    parts = dict(_kept_bytes(config))
  parts["all that is kept (exact)"] = sum(parts.values())
  stacked = 1 if config.mesh.is_divided else config.mesh.num_replicas
  step = stacked * step_bytes(config)
  parts["a step beside it (estimated)"] = step
  needed = parts["all that is kept (exact)"] + step
  parts["needed"] = needed
  sizes = [(name, human_bytes(size)) for name, size in parts.items()]
  console.print(terminal_table(("on a device", "memory"), sizes))
  if not math.isfinite(memory_bytes):
    print("--memory='80 GB' would say whether it fits")
    return
  spare = human_share(abs(1 - needed / memory_bytes))
  if needed > memory_bytes:
    raise command_line.StoppedError(
      f"does not fit: it lacks {spare} of {human_bytes(round(memory_bytes))}; "
      "take more stages or data shards, a smaller batch or rank, or "
      "mesh.remat='full'"
    )
  print(f"fits with {spare} of {human_bytes(round(memory_bytes))} to spare")


def _kept_bytes(config) -> Iterator[tuple[str, int]]:
  """Yields the parts of a run's state and their bytes on one device."""
  import jax

  mesh = config.mesh
  if mesh.layout == "mesh":
    jax.config.update("jax_platforms", "cpu")  # They only stand for others.
    num_devices = mesh.num_replicas * config.division.num_devices
    jax.config.update("jax_num_cpu_devices", num_devices)
  from dilocox_jax.training import build, states
  from dilocox_jax.trees import leaves_by_path

  sends = config.sync.named.exchanged
  phase = "rounds" if sends == "pseudo_gradient" else "data_parallel"
  in_flight = config.sync.named.schedule.most_in_flight
  state = states.abstract(build.programs(config), phase, in_flight=in_flight)
  totals: dict[str, int] = {}
  for path, leaf in leaves_by_path(state).items():
    names = [name for name in path.split("/") if not name.isdigit()]
    part = "/".join(names[: 2 if phase == "rounds" else 1])
    held = math.prod(leaf.sharding.shard_shape(leaf.shape))
    totals[part] = totals.get(part, 0) + held * leaf.dtype.itemsize
  yield from totals.items()


def _compile(config, values: flags.FlagValues) -> None:
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
  if values.table:
    compiled_run.write_table(workdir.parent, pathlib.Path(values.table))
  if not compiled.fits:
    raise command_line.StoppedError(
      f"{compiled.name} does not fit: take more stages or data shards, a "
      "smaller batch or rank, or mesh.remat='full'"
    )


if __name__ == "__main__":
  command_line.main(main, define_flags)
