"""Starts several processes for one run on this machine, like a cluster.

  python -m experiments.launch --processes=2 --
  --config=experiments/configs/dilocox.py --workdir=runs/dilocox

The flags after -- are those of experiments.train. The processes communicate
over the loopback interface. If a process fails, the launcher ends all
processes, and the same command continues the run from its newest checkpoint.
The launcher passes SIGTERM and Ctrl-C on to the processes, which save and stop.

With --link=100mbit every process gets a network of its own behind a link of
that rate, which the kernel throttles (Linux only; root is not needed). A short
transfer checks the links first.
"""

import contextlib
import functools
import itertools
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Sequence

from absl import flags

from dilocox_jax.simulate.quantities import (
  RATE,
  format_quantity,
  parse_quantity,
)
from experiments import train
from experiments.runtime import (
  command_line,
  cores,
  distributed_flags,
  file_lock,
  link_check,
  process_group,
  stop_signals,
  throttled_network,
)
from experiments.runtime.command_line import StoppedError, UsageError

_REFUSAL = (
  "processes of another launch still use --workdir={}: wait until they end, or "
  "end them"
)
_OWN = re.compile(r"--?(processes|devices|link|h|\?|help\w*)(=|$)")
_SHORT_RATE = re.compile(r"([\d.]+) ?([kmg]?)bit(/s)?", re.IGNORECASE)
_PORT_INSIDE = 9876  # Every port of a network of one's own is free.


def define_flags() -> None:
  """Defines the flags of the launcher, and those of the processes."""
  flags.DEFINE_integer(
    "processes",
    2,
    "Number of processes; the devices of the replicas are divided among them.",
    1,
  )
  flags.DEFINE_enum(
    "devices",
    "cpu",
    ["cpu", "gpu"],
    "Devices of the processes: the CPU, or GPUs that are divided in order.",
  )
  flags.DEFINE_string(
    "link",
    None,
    "Rate of the link of every process, up and down, such as 100mbit or "
    "'1 Gbit/s'; without it they use the loopback interface, unthrottled.",
  )
  train.define_flags()


def main(
  own_flags: Sequence[str],
  train_flags: Sequence[str],
  values: flags.FlagValues,
) -> None:
  """Checks the flags and the config, then runs the processes.

  Args:
    own_flags: Flags of the launcher, which stand before --.
    train_flags: Flags of the processes, which stand after --.
    values: Values of all these flags.
  """
  if not train_flags:
    raise UsageError(
      "the flags of experiments.train are missing: put them after --, for "
      "example -- --workdir=runs/dilocox"
    )
  _check_own(own_flags)
  for name in (*distributed_flags.NAMES, "distributed"):
    if values[name].present:
      raise UsageError(f"--{name} is set by experiments.launch: leave it out")
  values.config.mesh.layout = "mesh"
  config = command_line.run_config(values.config)
  distributed_flags.check_config(config)
  command_line.check_files(config)
  train.clock(values, config)
  count = values.processes
  devices = values.local_devices or distributed_flags.devices_each(
    config, count
  )
  workdir = command_line.writable(values.workdir)
  rate = link_rate(values.link) if values.link else None
  # The processes inherit the lock. So they still hold it if the launcher is
  # killed.
  refusal = _REFUSAL.format(workdir)
  with (
    file_lock.held(workdir / ".launch.lock", refusal) as lock,
    _network(rate, count) as network,
  ):
    coordinator = f"127.0.0.1:{_free_port()}"
    if network:
      coordinator = f"{network.addresses[0]}:{_PORT_INSIDE}"
    members = [
      process_group.Member(
        number,
        _command(network, number)
        + [
          *(sys.executable, "-m", "experiments.train", *train_flags),
          *("--distributed", f"--coordinator={coordinator}"),
          *(f"--num_processes={count}", f"--process_id={number}"),
        ],
        _environment(values.devices, number, devices, count),
        keep_open=[lock],
      )
      for number in range(count)
    ]
    _run(process_group.Group(members))


def link_rate(text: str) -> float:
  """Returns the bits a second of a rate such as "100mbit" or "1 Gbit/s".

  Raises:
    UsageError: If it is no rate, or none that the kernel can throttle to.
  """
  if match := _SHORT_RATE.fullmatch(text.strip()):
    prefix = {"k": "k", "m": "M", "g": "G"}.get(match[2].lower(), "")
    text = f"{match[1]} {prefix}bit/s"
  try:
    rate = parse_quantity(text, RATE, "--link")
  except ValueError as error:
    raise UsageError(error) from error
  if not 1e5 <= rate <= 1e11:
    raise UsageError(
      f"--link={text} must lie between 100 kbit/s and 100 Gbit/s"
    )
  return rate


@contextlib.contextmanager
def _network(
  rate: float | None, count: int
) -> Iterator[throttled_network.ThrottledNetwork | None]:
  """Makes throttled links that were checked; None if no rate is given."""
  if rate is None:
    yield None
    return
  links = [throttled_network.NodeLink(rate, rate)] * count
  with throttled_network.throttled_network(links) as network:
    ratios = link_check.check(network, links)
    print(
      f"links: {count} of {format_quantity(rate, RATE)}, measured "
      f"{min(ratios):.3f} to {max(ratios):.3f} times that less headers",
      flush=True,
    )
    yield network


def _command(
  network: throttled_network.ThrottledNetwork | None, number: int
) -> list[str]:
  """Returns what stands before the command of a process."""
  return network.command(number, []) if network else []


def _check_own(own_flags: Sequence[str]) -> None:
  """Raises UsageError if a flag before -- is not a flag of the launcher."""
  for flag in own_flags:
    if flag.startswith("-") and not _OWN.match(flag):
      raise UsageError(f"{flag} is for the processes: put it after --")


def _run(group: process_group.Group) -> None:
  """Runs all processes until they have ended, and passes signals on to them.

  After the first signal the processes save and stop. After a second signal they
  end at once (`stop_signals`). The launcher ends after all processes.
  """
  for number in stop_signals.SIGNALS:
    signal.signal(number, lambda number, _: group.send_signal(number))
  failure = group.run()
  if failure and failure.is_stop:
    sys.exit(failure.exit_code)  # Process 0 has printed its last step.
  if failure:
    hint = "all other processes were ended"
    if failure.is_from_outside:
      hint += ", and the same command continues the run"
    raise StoppedError(f"{failure.reason}; {hint}", failure.exit_code)


def _environment(
  platform: str, number: int, num_devices: int, count: int
) -> dict[str, str]:
  """Returns the environment variables of a process.

  They set its devices and its share of the CPU cores.

  Args:
    platform: "cpu" or "gpu".
    number: Number of the process, from 0.
    num_devices: Number of devices of each process.
    count: Number of processes.
  """
  environment = {
    **cores.limits(count),
    **os.environ,
    "DILOCOX_JAX_COMMAND": shlex.join(
      ["python", "-m", "experiments.launch", *sys.orig_argv[3:]]
    ),
  }
  if platform == "cpu":
    environment["JAX_PLATFORMS"] = "cpu"
  else:
    first = number * num_devices
    device_ids = range(first, first + num_devices)
    environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, device_ids))
  return environment


def _free_port() -> int:
  """Returns a free port of this machine.

  Raises:
    UsageError: If the host name does not resolve. The processes' communication
      library, gloo, needs the address of the host name.
  """
  try:
    socket.getaddrinfo(socket.gethostname(), None)
  except OSError as error:
    raise UsageError(
      f"this machine's host name {socket.gethostname()!r} does not resolve, "
      "but processes connect to it: add it to /etc/hosts"
    ) from error
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """Returns the arguments before the first --, and the arguments after it."""
  before = list(itertools.takewhile(lambda a: a != "--", arguments))
  return before, list(arguments[len(before) + 1 :])


if __name__ == "__main__":
  _own, _given = split(sys.argv[1:])
  sys.argv[1:] = _own + _given
  command_line.main(functools.partial(main, _own, _given), define_flags)
