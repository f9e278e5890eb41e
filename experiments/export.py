"""Writes the outer parameters of a run as a checkpoint for other libraries.

  python -m experiments.export --run=runs/x --workdir=exported

The folder then has config.json and model.safetensors, in the form that OPT,
Llama or Qwen2 has in `transformers`, whichever the model's options are. It
needs the extra `weights`. A run starts from such a folder with
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
  own_parts.register_parts(values.parts)
  workdir = command_line.writable(values.workdir, "export")
  import dilocox_jax as dx
  from dilocox_jax.models import weights
  from dilocox_jax.plan.model.shapes import parameter_count

  try:
    run = dx.load(values.run)
    shape = run.config.model.shape
    weights.family_of(shape)  # This takes no time, reading the run does.
    family = weights.write_checkpoint(workdir, shape, run.params)
  except (ValueError, RuntimeError, OSError) as error:
    raise command_line.UsageError(error) from error
  print(f"{family}, {parameter_count(shape):,} parameters: {workdir}")


if __name__ == "__main__":
  command_line.main(main, define_flags)
