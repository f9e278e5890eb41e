"""Writes the outer parameters of a run as a checkpoint for other libraries.

  python -m experiments.export --run=runs/x --workdir=exported

The folder then has config.json and model.safetensors in the format of
`transformers`, as OPT, Llama, Qwen2 or Qwen3: the model's options decide which
of them. A model of more than --max_file_bytes is divided among several files,
which model.safetensors.index.json lists. A run can start from such a folder
with --config.checkpoint.init_from.

If the run trained adapters (--config.lora.rank), the folder has only the
adapters, in the format of `peft`.
"""

from collections.abc import Sequence

from absl import app, flags

from experiments.runtime import command_line, parts_flag, run_flag, workdir_flag

MAX_FILE_BYTES = flags.DEFINE_integer(
  "max_file_bytes",
  5_000_000_000,
  "Largest number of bytes of tensors in a file.",
  lower_bound=1,
)
flags.adopt_module_key_flags(run_flag)
flags.adopt_module_key_flags(workdir_flag)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Writes the checkpoint of --run for other libraries, and prints its path."""
  command_line.refuse_arguments(argv)
  parts_flag.register()
  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "export")
  import dilocox_jax as dx

  with command_line.usage_errors(kinds=(ValueError, RuntimeError, OSError)):
    run = dx.load(run_flag.RUN.value)
    family = run.export(workdir, max_file_bytes=MAX_FILE_BYTES.value)
  kind = f"adapters of {family}" if run.config.lora.rank else family
  count = run.metrics.record["parameter_count"]
  print(f"{kind}, {count:,} parameters: {workdir}")


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
