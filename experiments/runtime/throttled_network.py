"""A network of throttled links on one machine, for real processes.

Every node is a network namespace of its own with one link to a switch, which
is a namespace too. The kernel lets no more pass than a link's rate: `tbf`
throttles what leaves a node on the node's side, and what reaches it on the
switch's side:

    node 0 (10.77.0.1) --up--> switch --down--> node 1 (10.77.0.2)

A namespace has no name. It exists as long as its holder, a process that only
sleeps, or a process of a node runs. All of them get SIGKILL when the launcher
ends, however it ends, so nothing is left behind, and the machine's own network
is never touched. As another user than root, all namespaces lie inside a user
namespace, in which the user is root.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from experiments.runtime.command_line import UsageError

_SWITCH = "switch"
_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
# The holder says when its namespace is there. Gloo finds the address to listen
# on by the name of the host, so the name of the host is the address.
_HOLD = """
import signal, socket, sys
socket.sethostname(sys.argv[1])
print("ready", flush=True)
signal.pause()
"""
_BURST_S = 0.002  # Time at full rate that a link which has rested catches up.
_LEAST_BURST_BYTES = 16_384  # A burst must hold several packets.
_QUEUE_MS = 50  # Longest wait in a link's queue; what comes then is dropped.
_DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")


class NodeLink(NamedTuple):
  """Rates of the link of a node.

  Attributes:
    up_bit_per_s: Rate at which the node sends.
    down_bit_per_s: Rate at which it receives.
  """

  up_bit_per_s: float
  down_bit_per_s: float


class ThrottledNetwork:
  """Nodes behind throttled links; `throttled_network` makes one.

  Attributes:
    addresses: Address of every node, in order.
  """

  def __init__(self, num_nodes: int, root: "_Root"):
    """Names the nodes without making anything.

    Args:
      num_nodes: Number of nodes.
      root: Makes namespaces and runs commands in them.
    """
    self.addresses = [f"10.77.0.{number + 1}" for number in range(num_nodes)]
    self._root = root

  def command(self, node: int, command: Sequence[str]) -> list[str]:
    """Returns the command line that runs a command on a node.

    Args:
      node: Number of the node, from 0.
      command: Command line, one string for each argument.
    """
    return self._root.inside(self.addresses[node], command)

  def throttle(self, node: int, link: NodeLink) -> None:
    """Sets the rates of a node's link, also while it is in use."""
    directions = (
      (self.addresses[node], "wan", link.up_bit_per_s),
      (_SWITCH, f"port{node}", link.down_bit_per_s),
    )
    for space, device, bit_per_s in directions:
      burst = max(_LEAST_BURST_BYTES, round(bit_per_s / 8 * _BURST_S))
      rate = ("rate", f"{round(bit_per_s)}bit", "burst", str(burst))
      self._root.run(
        space,
        *("tc", "qdisc", "replace", "dev", device, "root", "tbf", *rate),
        *("latency", f"{_QUEUE_MS}ms"),
      )

  def sent_bytes(self, node: int) -> int:
    """Returns the bytes that a node has sent so far, headers included."""
    path = f"/proc/{self._root.pids[self.addresses[node]]}/net/dev"
    with open(path) as file:
      (counters,) = [line for line in file if line.strip().startswith("wan:")]
    return int(counters.split(":")[1].split()[8])


@contextlib.contextmanager
def throttled_network(links: Sequence[NodeLink]) -> Iterator[ThrottledNetwork]:
  """Makes a network that exists as long as the context.

  Args:
    links: The link of every node, at least two.

  Raises:
    UsageError: If this machine or user may not make namespaces, or lacks a
      program that this needs.
  """
  missing = [tool for tool in _TOOLS if not shutil.which(tool)]
  if missing:
    raise UsageError(
      f"throttled links need the program {missing[0]}, which is not installed: "
      "install iproute2 and util-linux, or leave the link out"
    )
  with contextlib.ExitStack() as stack:
    root = _Root(stack)
    network = ThrottledNetwork(len(links), root)
    root.run(_SWITCH, *"ip link add bridge type bridge".split())
    root.run(_SWITCH, *"ip link set bridge up".split())
    for number, link in enumerate(links):
      _connect(root, network.addresses[number], number)
      network.throttle(number, link)
    yield network


def _connect(root: "_Root", address: str, number: int) -> None:
  """Joins a new namespace with the switch."""
  root.make(address)
  port, pid = f"port{number}", root.pids[address]
  for command in (
    f"ip link add {port} type veth peer name wan netns {pid}",
    f"ip link set {port} master bridge up",
  ):
    root.run(_SWITCH, *command.split())
  for command in (
    "ip link set lo up",
    f"ip addr add {address}/24 dev wan",
    "ip link set wan up",
  ):
    root.run(address, *command.split())


class _Root:
  """Makes namespaces, as root or as root of a user namespace.

  Attributes:
    pids: Process that holds a namespace, by the namespace's host name.
  """

  def __init__(self, stack: contextlib.ExitStack):
    """Makes the namespace of the switch.

    Args:
      stack: Ends the holders when it closes.
    """
    self.pids: dict[str, int] = {}
    self._stack = stack
    self._enter: list[str] = []  # Options of nsenter for the user namespace.
    if os.geteuid() == 0:
      self.make(_SWITCH)
    else:
      self._hold(_SWITCH, ["unshare", "--user", "--map-root-user"])
      self._enter = ["--user", "--preserve-credentials"]

  def make(self, name: str) -> None:
    """Makes a namespace with this host name."""
    prefix = []
    if self._enter:
      prefix = ["nsenter", f"--target={self.pids[_SWITCH]}", *self._enter]
    self._hold(name, [*prefix, "unshare"])

  def _hold(self, name: str, unshare: Sequence[str]) -> None:
    command = [*unshare, "--net", "--uts", *_DIES_WITH_PARENT]
    holder = subprocess.Popen(
      [*command, sys.executable, "-c", _HOLD, name],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    self._stack.callback(_end, holder)
    assert holder.stdout and holder.stderr
    if not holder.stdout.readline():
      reason = holder.stderr.read().strip().splitlines()[-1:]
      raise UsageError(
        "this machine lets you make no network namespaces "
        f"({''.join(reason)}): run as root, or leave the link out"
      )
    self.pids[name] = holder.pid

  def inside(self, name: str, command: Sequence[str]) -> list[str]:
    """Returns the command line that runs a command in a namespace."""
    target = f"--target={self.pids[name]}"
    enter = ["nsenter", target, *self._enter, "--net", "--uts"]
    return [*enter, *_DIES_WITH_PARENT, *command]

  def run(self, name: str, *command: str) -> None:
    """Runs a command in a namespace to its end.

    Raises:
      UsageError: If it fails.
    """
    found = subprocess.run(
      self.inside(name, command), capture_output=True, text=True
    )
    if found.returncode:
      raise UsageError(
        f"this machine cannot throttle links: {' '.join(command)} failed "
        f"({found.stderr.strip()})"
      )


def _end(holder: subprocess.Popen) -> None:
  holder.kill()
  holder.communicate()
