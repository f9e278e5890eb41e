"""Writes the outer parameters of a run as a checkpoint for other libraries.

  python -m experiments.export --run=runs/x --workdir=exported

The folder then has config.json and model.safetensors, in the form that OPT,
Llama or Qwen2 has in `transformers`, whichever the model's options are. Of a
run that trained adapters (--config.lora.rank) it has the adapters, in the form
of `peft`. It needs the extra `weights`. A run starts from a checkpoint with
--config.checkpoint.init_from.
"""

from absl import flags

from experiments.runtime import command_line, own_parts


def define_flags() -> None:
  """Defines the flags of this binary."""
  flags.DEFINE_string("run", None, "Directory of the run.", required=True)
  own_parts.define_parts()
  command_line.define_workdir()


def main(values: flags.FlagValues) -> None:
  """Writes the checkpoint and prints where it is."""
  workdir = command_line.writable(values.workdir, "export")
  import dilocox_jax as dx

  kinds = ValueError, RuntimeError, OSError
  with command_line.usage_errors(kinds=kinds):
    run = dx.load(values.run)
    family, kind = run.export(workdir), ""
  if run.config.lora.rank:
    kind = "adapters of "
  count = run.metrics.record["parameter_count"]
  print(f"{kind}{family}, {count:,} parameters: {workdir}")


if __name__ == "__main__":
  command_line.main(main, define_flags)
