"""Flags by which a replica finds the store where it meets the others."""

from typing import Any

from absl import flags

from experiments.runtime.command_line import UsageError

# In --help, flags are listed under the program that asks for them, not here.
flags.disclaim_key_flags()

_NAMES = ("meet", "replica", "secret")


def define_flags() -> None:
  """Defines --meet and the flags that need it."""
  flags.DEFINE_string(
    "meet",
    None,
    "Folder or URL (s3://bucket/run) where the replicas of the run meet: be "
    "one of them, a program of its own with a WORKDIR of its own. Sets "
    "exchange.collective=mailbox.",
  )
  flags.DEFINE_string("replica", None, "With --meet: name of this replica.")
  flags.DEFINE_string(
    "secret",
    None,
    "With --meet: file of the secret that all replicas share (see "
    "experiments.make_secret).",
  )
  flags.DEFINE_bool(
    "accept_version",
    False,
    "With --meet: take part with other code than the run has.",
  )


def check_flags(values: flags.FlagValues) -> None:
  """Checks that the flags go together, and says so in the config.

  Raises:
    UsageError: If they do not.
  """
  given = [name for name in _NAMES if values[name].value is not None]
  if not given:
    if values.accept_version:
      raise UsageError("--accept_version needs --meet")
    return
  if missing := [name for name in _NAMES if name not in given]:
    raise UsageError(f"--{given[0]} needs --{' and --'.join(missing)}")
  for name in ("distributed", "cluster"):
    if values[name].value:
      raise UsageError(
        f"--meet does not go with --{name}: a replica is one program on real "
        "links"
      )
  values.config.exchange.collective = "mailbox"


def meeting(values: flags.FlagValues) -> Any:
  """Returns where this replica meets the others; None if it does not."""
  if values.meet is None:
    return None
  from dilocox_jax.training.member import Meeting  # It loads JAX.

  return Meeting(
    values.meet, values.replica, values.secret, values.accept_version
  )
