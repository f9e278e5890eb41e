"""Writes the outer parameters of a run as a checkpoint for other libraries.

  python -m experiments.export --run=runs/x --workdir=exported

The folder then has config.json and model.safetensors in the format of
`transformers`, as OPT, Llama or Qwen2: the model's options decide which of the
three. If the run trained adapters (--config.lora.rank), the folder has only the
adapters, in the format of `peft`. The program needs the extra `weights`. A run
can start from such a folder with --config.checkpoint.init_from.
"""

from collections.abc import Sequence

from absl import app, flags

from experiments.runtime import command_line, parts_flag, run_flag, workdir_flag

flags.adopt_module_key_flags(run_flag)
flags.adopt_module_key_flags(workdir_flag)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Writes the checkpoint and prints where it is."""
  command_line.refuse_arguments(argv)
  parts_flag.register()
  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "export")
  import dilocox_jax as dx

  with command_line.usage_errors(kinds=(ValueError, RuntimeError, OSError)):
    run = dx.load(run_flag.RUN.value)
    family = run.export(workdir)
  kind = f"adapters of {family}" if run.config.lora.rank else family
  count = run.metrics.record["parameter_count"]
  print(f"{kind}, {count:,} parameters: {workdir}")


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
