r"""Starts several processes for one run on this machine, like a cluster.

  python -m experiments.launch --processes=2 -- \
    --config.sync.method=dilocox --workdir=runs/dilocox

The flags after -- are those of experiments.train. The processes communicate
over the loopback interface. If a process fails, the launcher ends all
processes, and the same command continues the run from its newest checkpoint.
The launcher passes SIGTERM and Ctrl-C on to the processes, which save and stop.

With --link=100mbit every process gets a network of its own behind a link of
that rate, which the kernel throttles (Linux only; root is not needed). --rtt
and --loss delay and lose packets. --link_cluster=FILE takes all links from a
cluster file of the simulator, one process for every replica. A short transfer
checks the links first.
"""

import contextlib
import functools
import itertools
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence

from absl import flags

from dilocox_jax.distributed import link_counter
from dilocox_jax.simulate.cluster import Link
from dilocox_jax.simulate.cluster_file import load_cluster
from dilocox_jax.simulate.quantities import RATE, SHARE, TIME, parse_quantity
from experiments import train
from experiments.runtime import (
  cluster_links,
  command_line,
  distributed_flags,
  file_lock,
  link_check,
  own_parts,
  process_group,
  stop_signals,
  throttled_network,
)
from experiments.runtime.command_line import StoppedError, UsageError
from experiments.runtime.namespaces import INTERFACE
from experiments.runtime.throttled_network import Links

_REFUSAL = (
  "processes of another launch still use --workdir={}: wait until they end, or "
  "end them"
)
_OWN = {
  *("processes", "devices", "link", "rtt", "loss", "link_cluster"),
  *("help", "h", "?", "helpfull", "helpshort"),
}
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
  flags.DEFINE_string(
    "rtt", None, "With --link: round trip between processes, such as '40 ms'."
  )
  flags.DEFINE_string(
    "loss",
    None,
    "With --link: share of packets lost at each end, such as '0.1 %'.",
  )
  flags.DEFINE_string(
    "link_cluster", None, "Cluster file with all links, in place of --link."
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
  distributed_flags.check_unset(values, "experiments.launch")
  values.config.mesh.layout = "mesh"
  own_parts.register_parts(values.parts)
  config = command_line.run_config(values.config)
  command_line.check_files(config)
  train.clock(values, config)
  count = values.processes
  devices = values.local_devices or distributed_flags.devices_each(
    config, count
  )
  workdir = command_line.writable(values.workdir, "train")
  links = _links(values, config.mesh.num_replicas)
  # The processes inherit the lock. So they still hold it if the launcher is
  # killed.
  refusal = _REFUSAL.format(workdir)
  with (
    file_lock.held(workdir / ".launch.lock", refusal) as lock,
    _network(links) as network,
  ):
    coordinator = f"127.0.0.1:{distributed_flags.free_port()}"
    if network:
      coordinator = f"{network.addresses[0]}:{_PORT_INSIDE}"
    members = [
      process_group.Member(
        number,
        [
          *(network.command(number, []) if network else ()),
          *(sys.executable, "-m", "experiments.train", *train_flags),
          *("--distributed", f"--coordinator={coordinator}"),
          *(f"--num_processes={count}", f"--process_id={number}"),
        ],
        _environment(values.devices, number, devices, count)
        | ({link_counter.LINK_VARIABLE: INTERFACE} if network else {}),
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


def _links(values: flags.FlagValues, num_replicas: int) -> Links | None:
  """Returns the links that the launcher's own flags ask for.

  Raises:
    UsageError: If the flags do not go together.
  """
  count, file = values.processes, values.link_cluster
  if not file:
    return _equal_links(values, count)
  for name in ("link", "rtt", "loss"):
    if values[name].value is not None:
      raise UsageError(f"--{name} and --link_cluster both describe the links")
  with command_line.usage_errors(kinds=(ValueError, OSError)):
    cluster = load_cluster(file, num_replicas)
  if cluster.num_replicas != count:
    raise UsageError(
      f"--link_cluster={file} has {cluster.num_replicas} replicas, and each "
      f"needs a process of its own: set --processes={cluster.num_replicas}"
    )
  return cluster_links.cluster_links(cluster)


def _equal_links(values: flags.FlagValues, count: int) -> Links | None:
  """Returns the links of --link, --rtt and --loss; None without --link."""
  numbers = {}
  for name, dimension in {"rtt": TIME, "loss": SHARE}.items():
    text = values[name].value
    if text is not None and values.link is None:
      raise UsageError(f"--{name} needs --link")
    with command_line.usage_errors():
      text = text or f"0 {dimension.example}"
      numbers[name] = parse_quantity(text, dimension, f"--{name}")
  if values.link is None:
    return None
  if count < 2:
    raise UsageError("--link needs --processes=2 or more: one has no peer")
  rate = link_rate(values.link)
  with command_line.usage_errors():
    link = Link(rate, rate, numbers["rtt"], numbers["loss"])
  return Links([cluster_links.node_link(link)] * count)


@contextlib.contextmanager
def _network(
  links: Links | None,
) -> Iterator[throttled_network.ThrottledNetwork | None]:
  """Makes throttled links that were checked; None if no links are given."""
  if links is None:
    yield None
    return
  with throttled_network.throttled_network(links) as network:
    ratios = link_check.check(network, links)
    checked = "between sites nothing to measure"
    if ratios:
      checked = (
        f"measured {min(ratios):.3f} to {max(ratios):.3f} times their rates "
        "less headers"
      )
    print(f"links: {len(links.nodes)}, {checked}", flush=True)
    network.impair(links)
    yield network


def _check_own(own_flags: Sequence[str]) -> None:
  """Raises UsageError if a flag before -- is not a flag of the launcher."""
  for flag in own_flags:
    name = flag.lstrip("-").partition("=")[0]
    if flag.startswith("-") and name not in _OWN:
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
  """Returns the environment variables of a process: its devices and threads.

  Args:
    platform: "cpu" or "gpu".
    number: Number of the process, from 0.
    num_devices: Number of devices of each process.
    count: Number of processes.
  """
  given = ["python", "-m", "experiments.launch", *sys.orig_argv[3:]]
  environment = {
    **os.environ,
    command_line.COMMAND_VARIABLE: shlex.join(given),
  }
  if "NPROC" not in os.environ:  # Else the user has set the threads.
    xla_flags = os.environ.get("XLA_FLAGS", "")
    environment |= process_group.limits_beside_exchange(count, xla_flags)
  if platform == "cpu":
    return environment | {"JAX_PLATFORMS": "cpu"}
  first = number * num_devices
  own = ",".join(map(str, range(first, first + num_devices)))
  return environment | {"JAX_LOCAL_DEVICE_IDS": own}


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
  """Returns the arguments before the first --, and the arguments after it."""
  before = list(itertools.takewhile(lambda a: a != "--", arguments))
  return before, list(arguments[len(before) + 1 :])


if __name__ == "__main__":
  _own, _given = split(sys.argv[1:])
  sys.argv[1:] = _own + _given
  command_line.main(functools.partial(main, _own, _given), define_flags)
