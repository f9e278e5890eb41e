r"""Trains one run, described by a config file, in a work directory.

  python -m experiments.train --workdir=runs/dilocox \
    --config.sync.method=dilocox --config.sync.sync_interval=50

After the first SIGTERM or Ctrl-C the run finishes the segment under way (a
round, or several data-parallel steps), saves and stops. A second signal ends
the program at once. The same command again continues the run. When the run has
ended, report.md in the work directory shows its results.

With --distributed the program is one of several processes of the run, one or
more on each machine of a cluster. For several processes on this machine see
experiments.launch. With --mailbox the program is one replica of a run whose
replicas are separate programs. They meet in a folder or a bucket
(docs/mailbox/how_to.md). With both flags, a replica has several processes, and
process 0 meets the other replicas.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import app, flags
from ml_collections import config_dict

from experiments.runtime import (
  command_line,
  config_flag,
  distributed_flags,
  parts_flag,
  run_configs,
  samples,
  workdir_flag,
)
from experiments.runtime.command_line import UsageError

if TYPE_CHECKING:
  from dilocox_jax.api.simulation_setup import ClusterClock
  from dilocox_jax.config import RunConfig
  from dilocox_jax.metrics.run_logs import RunLog
  from dilocox_jax.training.mailbox_replica import MailboxAddress

flags.adopt_module_key_flags(config_flag)
flags.adopt_module_key_flags(workdir_flag)
flags.adopt_module_key_flags(distributed_flags)
_PROFILE = flags.DEFINE_bool(
  "profile", False, "Write a jax.profiler trace to WORKDIR/profile."
)
_SAMPLE_TOKENS = flags.DEFINE_integer(
  "sample_tokens",
  100,
  "Tokens that the trained model writes for the report; 0: none.",
  lower_bound=0,
  upper_bound=samples.MOST_TOKENS,
)
_CHECK_MEMORY = flags.DEFINE_bool(
  "check_memory",
  True,
  "Refuse a run that needs more memory than the device or this machine has. "
  "The need is partly an estimate: --nocheck_memory tries all the same.",
)

_LOG = flags.DEFINE_string(
  "log",
  None,
  "Also send every row to: tensorboard (files in WORKDIR/tensorboard), wandb "
  "(Weights & Biases), a log that --parts or the config file registers, or "
  "several joined by +. Settings follow a name: wandb(project=links).",
)

# A simulated clock.
_CLUSTER = flags.DEFINE_string(
  "cluster",
  None,
  "Also say what the run would cost on this cluster (see experiments."
  "simulate): loss against simulated hours. The loss does not depend on it.",
)
_STEP_S = flags.DEFINE_float(
  "step_s",
  None,
  "With --cluster: seconds of an inner step; by default from operations.",
  lower_bound=0.0,
)

# One replica of a run by mailbox.
_MAILBOX = flags.DEFINE_string(
  "mailbox",
  None,
  "Folder or URL (s3://bucket/run) where the replicas of the run meet: be "
  "one of them, a program of its own with a WORKDIR of its own. Sets "
  "exchange.collective=mailbox.",
)
_REPLICA = flags.DEFINE_string(
  "replica", None, "With --mailbox: name of this replica."
)
_SECRET = flags.DEFINE_string(
  "secret",
  None,
  "With --mailbox: file of the secret that all replicas share (see "
  "experiments.make_secret).",
)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Trains the run of --config, and prints where its report is."""
  command_line.refuse_arguments(argv)
  parts_flag.register()
  config_values = config_flag.CONFIG.value
  process = distributed_flags.process_settings(config_values)
  address = mailbox_address(config_values)
  config = run_configs.run_config(config_values)
  run_configs.check_files(config)
  simulated_clock = clock(config)
  log = run_log()
  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "train")
  # This import takes seconds, so bad input is refused before it.
  from experiments.runtime import running

  running.train(
    config,
    workdir,
    profile=_PROFILE.value,
    clock=simulated_clock,
    process=process,
    address=address,
    num_sample_tokens=_SAMPLE_TOKENS.value,
    check_memory=_CHECK_MEMORY.value,
    log=log,
  )


def run_log() -> "RunLog | None":
  """Returns the log that --log asks for; None if the flag is not given.

  Raises:
    UsageError: If there is no such log, if one of its settings is wrong, or if
      its package is not installed.
  """
  if _LOG.value is None:
    return None
  from dilocox_jax.metrics.run_logs import named_logs

  with command_line.usage_errors():
    return named_logs(_LOG.value)


def mailbox_address(
  config: config_dict.ConfigDict,
) -> "MailboxAddress | None":
  """Returns the mailbox that --mailbox, --replica and --secret describe.

  A mailbox is a folder or bucket through which replicas exchange.

  Args:
    config: Value of --config. Its exchange.collective becomes "mailbox" if a
      mailbox is given and the field is "auto".

  Returns:
    The address of the mailbox; None if none of the flags is given.

  Raises:
    UsageError: If only some of the flags are given, if --cluster is given too,
      or if the replica's name is wrong. Without --distributed also if the file
      of the secret cannot be read.
  """
  needed_flags = (_MAILBOX, _REPLICA, _SECRET)
  # An empty text, e.g. of a shell variable that is not set, is a mistake.
  if all(flag.value is None for flag in needed_flags):
    return None
  where = _MAILBOX.value
  name = _REPLICA.value
  secret = _SECRET.value
  if not where or not name or not secret:
    missing = [f"--{flag.name}" for flag in needed_flags if not flag.value]
    raise UsageError(
      "--mailbox, --replica and --secret go together: give"
      f" {' and '.join(missing)}"
    )
  if _CLUSTER.value:
    raise UsageError(
      "--mailbox does not go with --cluster: its replicas meet on real links"
    )
  # If the user has set another collective, the training refuses it later
  # (`mailbox_config`).
  exchange = config.get("exchange") or {}
  if exchange.get("collective", "auto") == "auto":
    run_configs.set_field(config, "exchange", "collective", "mailbox")
  from dilocox_jax.mailbox_protocol.roster import checked_name, read_secret

  with command_line.usage_errors():
    checked_name(name)
    # Of several processes only process 0 needs the secret. They compare later
    # what they have (`MailboxReplica.check_processes`).
    if not distributed_flags.DISTRIBUTED.value:
      read_secret(secret)
  from dilocox_jax.training.mailbox_replica import (
    MailboxAddress,  # It loads JAX.
  )

  return MailboxAddress(where=where, name=name, secret=secret)


def clock(config: "RunConfig") -> "ClusterClock | None":
  """Returns a clock that simulates a run on --cluster; None without --cluster.

  Raises:
    UsageError: If the cluster does not exist or does not fit the run, or if
      --step_s is wrong or given without --cluster.
  """
  cluster = _CLUSTER.value
  command_line.refuse_unused(
    _STEP_S, is_used=cluster is not None, needs="--cluster"
  )
  if cluster is None:
    return None
  from dilocox_jax.api import simulation_setup as setup

  with command_line.usage_errors(kinds=(ValueError, OSError)):
    options = setup.Options(step_s=_STEP_S.value)
    return setup.ClusterClock(config, cluster, options)


if __name__ == "__main__":
  app.run(main, flags_parser=config_flag.parse_flags)
