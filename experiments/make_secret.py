r"""Makes the secret that the replicas of a run in an object store share.

  python -m experiments.make_secret --file=run.secret

The file can be read by its owner alone. Copy it to every machine of the run by
a way that nobody else can read, e.g. scp.
"""

from absl import flags

from dilocox_jax.meeting.members import write_secret
from experiments.runtime import command_line


def define_flags() -> None:
  """Defines the flags of this binary."""
  text = "File to write; it must not exist."
  flags.DEFINE_string("file", None, text, required=True)


def main(values: flags.FlagValues) -> None:
  """Writes the secret."""
  with command_line.usage_errors():
    write_secret(values.file)
  print(f"the secret is in {values.file}; only you can read it")


if __name__ == "__main__":
  command_line.main(main, define_flags)
