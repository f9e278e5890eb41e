r"""Trains one run with several processes on the CPU of this machine.

  python -m experiments.launch --processes=2 --config.sync.method=dilocox \
    --workdir=runs/dilocox

The launcher takes the flags of experiments.train. It sets --distributed,
--coordinator, --num_processes and --process_id itself. If a process fails, the
launcher ends all processes. The same command then continues the run from its
newest checkpoint. After SIGTERM or Ctrl-C the processes save and stop.

With --link='100 Mbit/s' each process is behind a link of its own, which the
kernel throttles to that rate (Linux only). --rtt delays packets, and --loss
drops some of them. Short transfers check the rates of the links first. Without
--link the processes communicate over the loopback interface.
"""

import sys
from collections.abc import Sequence

from absl import app, flags

from dilocox_jax.checks import require
from dilocox_jax.distributed import link_counter
from dilocox_jax.metrics import work_directory
from dilocox_jax.simulate import quantities
from dilocox_jax.simulate.cluster import Link
from experiments import train
from experiments.runtime import (
  command_line,
  config_flag,
  distributed_flags,
  link_check,
  parts_flag,
  placement,
  process_group,
  run_configs,
  workdir_flag,
)
from experiments.runtime.command_line import UsageError
from experiments.runtime.throttled_links import (
  INTERFACE,
  ThrottledNetwork,
  throttled_network,
)

_REFUSAL = (
  "another launch is at work in --workdir={}: wait until it ends, or end it"
)
_PORT_INSIDE = 9876  # In a new network namespace every port is free.

flags.adopt_module_key_flags(train)
_PROCESSES = flags.DEFINE_integer(
  "processes",
  2,
  "Number of processes; the devices of the replicas are divided among them.",
  lower_bound=1,
)
_LINK = flags.DEFINE_string(
  "link", None, "Rate of every process's link, up and down, e.g. '100 Mbit/s'."
)
_RTT = flags.DEFINE_string(
  "rtt", "0 ms", "With --link: round trip between processes, e.g. '40 ms'."
)
_LOSS = flags.DEFINE_string(
  "loss", "0 %", "With --link: share of packets lost at each end, e.g. '0.1 %'."
)
# The flags that the launcher does not hand on to experiments.train.
_LAUNCHER_FLAGS = (_PROCESSES, _LINK, _RTT, _LOSS)


@command_line.one_line_errors()
def main(argv: Sequence[str]) -> None:
  """Checks flags and config, and runs the processes until all have ended."""
  command_line.refuse_arguments(argv)
  distributed_flags.check_unset("experiments.launch")
  parts_flag.register()
  config_values = config_flag.CONFIG.value
  run_configs.set_field(config_values, "mesh", "layout", "mesh")
  # The flags are checked here too, so that a mistake is one line of the
  # launcher. Every process reads the flags again.
  train.mailbox_address(config_values)
  config = run_configs.run_config(config_values)
  run_configs.check_files(config)
  train.clock(config)
  count = _PROCESSES.value
  if not distributed_flags.LOCAL_DEVICES.value:
    # Devices that cannot be divided are found before any process starts.
    placement.devices_each(config, count)
  workdir = workdir_flag.writable(workdir_flag.WORKDIR.value, "train")
  link = _link()
  # The processes inherit the lock. So the lock is held until the last process
  # has ended, even if the launcher is killed and the processes live on.
  with work_directory.locked(
    workdir / ".launch.lock", _REFUSAL.format(workdir)
  ) as lock:
    if link is None:
      _run_processes(count, lock)
      return
    with throttled_network([link] * count) as network:
      # The rates are measured before delays and losses could lower them.
      link_check.check(network)
      network.impair()
      _run_processes(count, lock, network)


def _run_processes(
  count: int, lock: int, network: ThrottledNetwork | None = None
) -> None:
  """Starts the processes of a run of `experiments.train`, and waits for them.

  The processes inherit the file descriptor `lock`. With `network`, each process
  runs on a node of its own. Raises StoppedError if a process fails.
  """
  environment = process_group.environment(count)
  if network:
    coordinator = f"{network.addresses[0]}:{_PORT_INSIDE}"
    # Each process records the bytes that pass its interface.
    environment[link_counter.LINK_VARIABLE] = INTERFACE
  else:
    coordinator = f"127.0.0.1:{placement.free_port()}"
  members = []
  for number in range(count):
    command = [
      sys.executable,
      "-m",
      "experiments.train",
      *_train_flags(),
      "--distributed",
      f"--coordinator={coordinator}",
      f"--num_processes={count}",
      f"--process_id={number}",
    ]
    if network:
      command = network.command(number, command)
    members.append(
      process_group.Member(number, command, environment, keep_open=[lock])
    )
  process_group.run(members)


def _train_flags() -> list[str]:
  """Returns the flags of the command line without the launcher's own flags."""
  launcher_flags = flags.FlagValues()
  launcher_flags.set_gnu_getopt()
  for flag in _LAUNCHER_FLAGS:
    launcher_flags[flag.name] = flags.FLAGS[flag.name]
  _, *train_flags = launcher_flags(sys.argv, known_only=True)
  return train_flags


def _link() -> Link | None:
  """Returns the link of --link, --rtt and --loss; None without --link.

  Raises UsageError if a value is wrong, if --rtt or --loss are given without
  --link, or if there is only one process.
  """
  has_link = _LINK.value is not None
  command_line.refuse_unused(_RTT, _LOSS, is_used=has_link, needs="--link")
  if not has_link:
    return None
  if _PROCESSES.value < 2:
    raise UsageError("--link needs --processes=2 or more: one has no peer")
  with command_line.usage_errors():
    rate_bps = quantities.parse_quantity(_LINK.value, quantities.RATE, "--link")
    rtt_s = quantities.parse_quantity(_RTT.value, quantities.TIME, "--rtt")
    loss = quantities.parse_quantity(_LOSS.value, quantities.SHARE, "--loss")
    require(
      1e5 <= rate_bps <= 1e11,
      f"--link={_LINK.value} must lie between 100 kbit/s and 100 Gbit/s",
    )
    return Link(up_bps=rate_bps, down_bps=rate_bps, rtt_s=rtt_s, loss=loss)


if __name__ == "__main__":
  app.run(main, flags_parser=config_flag.parse_flags)
