r"""Compiles a run for TPU slices that are not there, and reports what it needs.

  python -m experiments.compile_report --workdir=runs/compiled \
    --config=experiments/configs/compiled.py:tiny_dilocox --topology=v5e:2x2

The program is the trainer's own, a round in which everything that can arrive
does. The page says how much memory a chip needs, which products it computes,
what it sends inside a slice and between slices, and where each transfer
between slices starts and ends relative to the inner steps. `make
compile-report` makes the environment that this needs.
"""

import pathlib

from absl import flags

from experiments.runtime import command_line


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_config()
  command_line.define_workdir()
  flags.DEFINE_string(
    "topology", "v5p:4x4x8", "Kind and size of a slice, e.g. v5e:2x2."
  )
  flags.DEFINE_integer("slices", 2, "Number of slices.", lower_bound=1)
  flags.DEFINE_string(
    "table", None, "CSV file to write: memory of all reports beside --workdir."
  )


def main(values: flags.FlagValues) -> None:
  """Compiles, writes the page and prints where it is."""
  import os

  # The slices are only compiled for; nothing may look for a real one.
  os.environ["JAX_PLATFORMS"] = "cpu"
  from experiments.compilation import memory_table
  from experiments.compilation.page import finding, write_compiled
  from experiments.compilation.run import compiled_report

  config = command_line.run_config(values.config)
  workdir = command_line.writable(values.workdir, "compile_report")
  with command_line.usage_errors():
    compiled = compiled_report(config, values.topology, values.slices)
  page = write_compiled(compiled, workdir, command_line.own_command())
  print(f"{compiled.name}: {finding(compiled)}")
  print(f"report: {page}")
  if values.table:
    memory_table.write(workdir.parent, pathlib.Path(values.table))
  if not compiled.fits:
    raise command_line.StoppedError(
      f"{compiled.name} does not fit: it needs "
      f"{compiled.analysis.needed_bytes / 2**30:.1f} GiB of the "
      f"{compiled.memory_bytes / 2**30:.1f} GiB of a chip: take more stages or "
      "data shards, a smaller batch or rank, or mesh.remat='full'"
    )


if __name__ == "__main__":
  command_line.main(main, define_flags)
