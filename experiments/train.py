r"""Trains one run, described by a config file, in a work directory.

  python -m experiments.train --workdir=runs/dilocox \
    --config.sync.method=dilocox --config.sync.sync_interval=50

The first SIGTERM or Ctrl-C saves after the segment under way and stops; a
second one ends at once. The same command again continues the run. The work
directory then holds config, versions, metrics.jsonl, figures and report.md.

With --distributed it is one of several processes of the run: start the same
command on every machine of a cluster, or see experiments.launch for several
processes on this one. With --meet it is one replica of a run whose replicas are
programs of their own, which meet in a folder or a bucket (docs/mailbox.md).
"""

from typing import Any

from absl import flags

from experiments.runtime import command_line, distributed_flags
from experiments.runtime.command_line import UsageError

_MEETING = ("meet", "replica", "secret", "accept_version")


def define_flags() -> None:
  """Defines the flags of this binary."""
  command_line.define_config()
  command_line.define_workdir("A run that it holds goes on.")
  flags.DEFINE_bool(
    "profile", False, "Write a jax.profiler trace to WORKDIR/profile."
  )

  text = "Tokens that the trained model writes for the report; 0: none."
  flags.DEFINE_integer("sample_tokens", 100, text, lower_bound=0)
  flags.DEFINE_bool(
    "check_memory",
    True,
    "Refuse a run that needs more memory than the device or this machine has. "
    "The need is partly an estimate: --nocheck_memory tries all the same.",
  )
  flags.DEFINE_string(
    "cluster",
    None,
    "Also say what the run would cost on this cluster (see experiments."
    "simulate): loss against simulated hours. The loss does not depend on it.",
  )
  flags.DEFINE_float(
    "step_s",
    None,
    "With --cluster: seconds of an inner step; by default from operations.",
    lower_bound=0.0,
  )
  distributed_flags.define_flags()
  _define_meeting()


def _define_meeting() -> None:
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


def main(values: flags.FlagValues) -> None:
  """Trains and prints where the report is."""
  is_distributed = distributed_flags.check_flags(values)
  met = meeting(values)
  config = command_line.run_config(values.config)
  command_line.check_files(config)
  simulated_clock = clock(values, config)
  workdir = command_line.writable(values.workdir, "train")
  # This takes seconds, so bad input is refused before it.
  from experiments.runtime import running

  running.train(
    config,
    workdir,
    profile=values.profile,
    clock=simulated_clock,
    place=values if is_distributed else None,
    meeting=met,
    num_sample_tokens=values.sample_tokens,
    check_memory=values.check_memory,
  )


def meeting(values: flags.FlagValues) -> Any:
  """Returns where this replica meets the others; None if it does not.

  Says so in the config, too.

  Raises:
    UsageError: If the flags do not go together, or the name or the secret is
      wrong.
  """
  given = [name for name in _MEETING if values[name].value]
  needed = [name for name in _MEETING[:3] if name not in given]
  if not given:
    return None
  if needed:
    raise UsageError(f"--{given[0]} needs --{' and --'.join(needed)}")
  for name in ("distributed", "cluster"):
    if values[name].value:
      raise UsageError(
        f"--meet does not go with --{name}: a replica is one program on real "
        "links"
      )
  values.config.exchange.collective = "mailbox"
  from dilocox_jax.meeting.members import checked_name, read_secret

  with command_line.usage_errors():
    checked_name(values.replica)
    read_secret(values.secret)
  from dilocox_jax.training.mailbox_replica import Meeting  # It loads JAX.

  return Meeting(
    values.meet, values.replica, values.secret, values.accept_version
  )


def clock(values: flags.FlagValues, config):
  """Returns the simulated clock that --cluster asks for, or None.

  Raises:
    UsageError: If it does not fit the run.
  """
  is_timed = values.cluster is not None
  command_line.refuse_unused(values, [("step_s", is_timed, "--cluster")])
  if not is_timed:
    return None
  from dilocox_jax.api import simulation_setup as setup

  with command_line.usage_errors(kinds=(ValueError, OSError)):
    options = setup.Options(step_s=values.step_s)
    return setup.ClusterClock(config, values.cluster, options)


if __name__ == "__main__":
  command_line.main(main, define_flags)
