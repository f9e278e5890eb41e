"""Makes the secret that the replicas of a run with --mailbox share.

  python -m experiments.make_secret --file=run.secret

The file must not exist yet. Only its owner can read it. Copy it to every
machine of the run in a way that nobody else can read, e.g. with scp.
"""

from collections.abc import Sequence

from absl import app, flags

from dilocox_jax.mailbox_protocol.roster import write_secret
from experiments.runtime import command_line
from experiments.runtime.command_line import UsageError

_FILE = flags.DEFINE_string(
  "file", None, "File to write; it must not exist.", required=True
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Writes a new secret to --file, and prints the path."""
  command_line.refuse_arguments(argv)
  try:
    with command_line.usage_errors():
      write_secret(_FILE.value)
  except OSError as error:
    raise UsageError(
      f"--file={_FILE.value} cannot be written: {error.strerror}"
    ) from error
  print(f"the secret is in {_FILE.value}; only you can read it")


if __name__ == "__main__":
  app.run(main, flags_parser=command_line.parse_flags)
