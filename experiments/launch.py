r"""Starts several processes for one run on this machine, like a cluster.

  python -m experiments.launch --processes=2 --config.sync.method=dilocox \
    --workdir=runs/dilocox

All other flags are those of experiments.train. The processes communicate over
the loopback interface. If a process fails, the launcher ends all processes, and
the same command continues the run from its newest checkpoint. The launcher
passes SIGTERM and Ctrl-C on to the processes, which save and stop.

With --link='100 Mbit/s' every process gets a network of its own behind a link
of that rate, which the kernel throttles (Linux only; root is not needed). --rtt
and --loss delay and lose packets. A short transfer checks the links first.
"""

import contextlib
import sys

from absl import flags

from dilocox_jax.checks import require
from dilocox_jax.distributed import link_counter
from dilocox_jax.metrics import work_directory
from dilocox_jax.simulate.cluster import Link
from dilocox_jax.simulate.quantities import RATE, SHARE, TIME, parse_quantity
from experiments import train
from experiments.runtime import (
  command_line,
  distributed_flags,
  link_check,
  process_group,
)
from experiments.runtime.command_line import UsageError
from experiments.runtime.throttled_links import INTERFACE, throttled_network

_REFUSAL = (
  "another launch is at work in --workdir={}: wait until it ends, or end it"
)
_OWN = ("processes", "link", "rtt", "loss")
_PORT_INSIDE = 9876  # Every port of a network of one's own is free.


def define_flags() -> None:
  """Defines the flags of the launcher, and those of the processes."""
  flags.DEFINE_integer(
    "processes",
    2,
    "Number of processes; the devices of the replicas are divided among them.",
    1,
  )
  text = "Rate of every process's link, up and down, e.g. '100 Mbit/s'."
  flags.DEFINE_string("link", None, text)
  text = "With --link: round trip between processes, e.g. '40 ms'."
  flags.DEFINE_string("rtt", None, text)
  text = "With --link: share of packets lost at each end, e.g. '0.1 %'."
  flags.DEFINE_string("loss", None, text)
  train.define_flags()


def main(values: flags.FlagValues) -> None:
  """Checks the flags and the config, then runs the processes."""
  distributed_flags.check_unset(values, "experiments.launch")
  values.config.mesh.layout = "mesh"
  config = command_line.run_config(values.config)
  command_line.check_files(config)
  train.clock(values, config)
  count = values.processes
  if not values.local_devices:
    distributed_flags.devices_each(config, count)
  workdir = command_line.writable(values.workdir, "train")
  link, none = _link(values), contextlib.nullcontext()
  # The processes inherit the lock. So it is held until the last of them has
  # ended, also where they outlive a launcher that is killed.
  refusal = _REFUSAL.format(workdir)
  with (
    work_directory.locked(workdir / ".launch.lock", refusal) as lock,
    throttled_network([link] * count) if link else none as network,
  ):
    coordinator = f"127.0.0.1:{distributed_flags.free_port()}"
    if network:
      link_check.check(network)
      network.impair()
      coordinator = f"{network.addresses[0]}:{_PORT_INSIDE}"
    members = [
      process_group.Member(
        number,
        [
          *(network.command(number, []) if network else ()),
          *(sys.executable, "-m", "experiments.train", *_train_flags(values)),
          *("--distributed", f"--coordinator={coordinator}"),
          *(f"--num_processes={count}", f"--process_id={number}"),
        ],
        process_group.environment(count)
        | ({link_counter.LINK_VARIABLE: INTERFACE} if network else {}),
        keep_open=[lock],
      )
      for number in range(count)
    ]
    process_group.run(members)


def _train_flags(values: flags.FlagValues) -> list[str]:
  """Returns the flags of the command line that are not the launcher's own."""
  own = flags.FlagValues()
  own.set_gnu_getopt()
  for name in _OWN:
    own[name] = values[name]
  return own(sys.argv, known_only=True)[1:]


def _link(values: flags.FlagValues) -> Link | None:
  """Returns the link of --link, --rtt and --loss; None without --link."""
  has_link = values.link is not None
  command_line.refuse_unused(
    values, [(name, has_link, "--link") for name in ("rtt", "loss")]
  )
  if not has_link:
    return None
  if values.processes < 2:
    raise UsageError("--link needs --processes=2 or more: one has no peer")
  with command_line.usage_errors():
    rate, rtt_s, loss = (
      parse_quantity(values[name].value or f"0 {of.example}", of, f"--{name}")
      for name, of in (("link", RATE), ("rtt", TIME), ("loss", SHARE))
    )
    require(
      1e5 <= rate <= 1e11,
      f"--link={values.link} must lie between 100 kbit/s and 100 Gbit/s",
    )
    return Link(rate, rate, rtt_s, loss)


if __name__ == "__main__":
  command_line.main(main, define_flags)
