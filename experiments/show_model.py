r"""Shows a config's model: its leaves, its size, and the memory of a device.

  python -m experiments.show_model --config.model.preset=opt_1_3b \
    --config.mesh.layout=mesh --config.mesh.num_stages=4
  python -m experiments.show_model --config.model.preset=chinchilla_300m \
    --compile_for=v5p:2x2x1

Nothing is allocated, so models of any size and meshes of any number of devices
can be looked at on a laptop. Memory is that of what a run keeps between two
steps; activations and the compiler's buffers come on top. With --compile_for
the TPU's compiler says how many bytes that is on a chip that holds all
replicas (`pip install 'dilocox_jax[tpu]'`).
"""

import math
from collections.abc import Iterator

from absl import flags

from experiments.runtime import command_line


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_config()
  flags.DEFINE_string(
    "compile_for",
    None,
    "Compile the inner steps for one of these TPU chips, e.g. v5p:2x2x1, and "
    "show their memory. It takes minutes.",
  )


def main(values: flags.FlagValues) -> None:
  """Prints the tables."""
  config = command_line.run_config(values.config)
  from rich.console import Console

  from dilocox_jax.plan.model import shapes
  from dilocox_jax.report.text_tables import terminal_table
  from dilocox_jax.report.units import human_bytes

  shape, length = config.model.shape, config.data.sequence_length
  leaves = shapes.parameter_shapes(shape)
  rows = [(p, str(x), f"{math.prod(x):,}") for p, x in leaves.items()]
  rows.append(("all", "", f"{shapes.parameter_count(shape):,}"))
  console = Console()
  header = ("leaf", "shape", "parameters")
  console.print(terminal_table(header, rows, (0, 1)))
  flops = shapes.flops_per_token(shape, length)
  print(f"{flops:.4g} FLOPs a token of training (L = {length})")
  try:
    parts = dict(_device_bytes(config))
  except ValueError as error:
    raise command_line.UsageError(error) from error
  parts["all"] = sum(parts.values())
  sizes = [(name, human_bytes(size)) for name, size in parts.items()]
  console.print(terminal_table(("kept on a device", "memory"), sizes))
  if values.compile_for:
    with command_line.usage_errors():
      temporary_bytes, flops = _compiled_needs(config, values.compile_for)
    print(
      f"{human_bytes(temporary_bytes)} beside it in an inner step on "
      f"{values.compile_for}; {flops:.4g} FLOPs a token in matrix products, "
      "those of a fused attention kernel not counted"
    )


def _compiled_needs(config, topology: str) -> tuple[int, float]:
  """Returns bytes beside what is kept, and FLOPs a token, by the compiler."""
  from experiments.benchmarks import inner, tpu_compiler
  from experiments.compilation.flops import product_flops

  compiled = tpu_compiler.compiled_for_tpu(config, topology)
  analysis = compiled.memory_analysis()
  num_tokens = config.mesh.num_replicas * config.tokens_per_replica_step
  flops = product_flops(compiled.as_text()) / (inner.STEPS * num_tokens)
  return analysis.temp_size_in_bytes if analysis else 0, float(flops)


def _device_bytes(config) -> Iterator[tuple[str, int]]:
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


if __name__ == "__main__":
  command_line.main(main, define_flags)
