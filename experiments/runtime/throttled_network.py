"""A network of throttled links on one machine, for real processes.

Every node is a network namespace of its own with one link to a switch, which
is a namespace too. The kernel lets no more pass than a link's rate: `tbf`
throttles what leaves a node on the node's side, and what reaches it on the
switch's side:

    node 0 (10.77.0.1) --up--> switch --down--> node 1 (10.77.0.2)

Nodes of a site that share an uplink meet at a switch of their own, and its link
to the switch above is throttled instead of theirs:

    node 0 --> site 0 --up--> switch --down--> site 1 --> node 2
    node 1 --> site 0                          site 1 --> node 3

TCP controls congestion by Reno on these links, whatever the machine prefers.
Every kernel has it, and it keeps a throttled link full. BBR, the default of
some machines, sends less now and then to measure the round trip, and took 5 to
18 % longer (docs/log.md).

Delay and loss need the kernel's `netem`, which some kernels lack. Half of the
round trip is added where a packet leaves, and a packet may be lost at each end,
as the simulator counts it (`simulate.sites.Link`).

A namespace has no name. It exists as long as its holder, a process that only
sleeps, or a process of a node runs. All of them get SIGKILL when the launcher
ends, however it ends, so nothing is left behind, and the machine's own network
is never touched. As another user than root, all namespaces lie inside a user
namespace, in which the user is root.
"""

import contextlib
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dilocox_jax.distributed import link_counter
from experiments.runtime.command_line import UsageError

INTERFACE = "wan"  # The end of its link on a node.
_SWITCH = "switch"
_SUBNET = "10.77.0.0/24"
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
_NETEM_PACKETS = 100_000  # Most packets under way; 150 MB of full frames.
_QUEUE_S = 0.05  # Longest wait in a link's queue; what comes then is dropped.
# Nodes that share an uplink share its queue. In a long one the small messages
# of one node wait behind the data of another; real routers let them pass.
_SHARED_QUEUE_S = 0.003
_DIES_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")


class NodeLink(NamedTuple):
  """Link of a node, or of a site whose nodes share it.

  Attributes:
    up_bit_per_s: Rate at which the node sends.
    down_bit_per_s: Rate at which it receives.
    rtt_s: Round trip to a node with such a link (seconds).
    loss: Probability that a packet is lost at this end, 0 to 1.
  """

  up_bit_per_s: float
  down_bit_per_s: float
  rtt_s: float = 0.0
  loss: float = 0.0


class Uplink(NamedTuple):
  """A link that several nodes share; their own links are not throttled.

  Attributes:
    nodes: Numbers of the nodes.
    link: The link.
  """

  nodes: tuple[int, ...]
  link: NodeLink


class Links(NamedTuple):
  """The links of a network.

  Attributes:
    nodes: The link of every node, at least two; None where nodes share one.
    uplinks: The links that nodes share.
  """

  nodes: Sequence[NodeLink | None]
  uplinks: Sequence[Uplink] = ()

  def between(self, sender: int, receiver: int) -> float:
    """Returns the bits a second from a node to another; infinity in a site."""
    up, down = self._site(sender), self._site(receiver)
    if up is not None and up == down:
      return math.inf
    return min(
      self._link(sender, up).up_bit_per_s,
      self._link(receiver, down).down_bit_per_s,
    )

  def _site(self, node: int) -> int | None:
    sites = [n for n, each in enumerate(self.uplinks) if node in each.nodes]
    return sites[0] if sites else None

  def _link(self, node: int, site: int | None) -> NodeLink:
    link = self.nodes[node] if site is None else self.uplinks[site].link
    assert link, "a node without an uplink has a link"
    return link


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
    """Sets the rates of a node's own link, also while it is in use."""
    _throttle(self._root, self.addresses[node], f"port{node}", link)

  def impair(self, links: Links) -> None:
    """Adds delays and losses to links that are throttled already.

    Raises:
      UsageError: If there are any and the kernel lacks netem.
    """
    for number, (_, link) in enumerate(links.uplinks):
      _impair(self._root, f"site{number}", f"site{number}", link)
    for node, link in enumerate(links.nodes):
      if link:
        _impair(self._root, self.addresses[node], f"port{node}", link)

  def sent_bytes(self, node: int) -> int:
    """Returns the bytes that a node has sent so far, headers included."""
    holder = self._root.pids[self.addresses[node]]
    return link_counter.sent_bytes(INTERFACE, f"/proc/{holder}/net/dev")


@contextlib.contextmanager
def throttled_network(links: Links) -> Iterator[ThrottledNetwork]:
  """Makes a network that exists as long as the context.

  Links have their rates at once, and delays and losses after
  `ThrottledNetwork.impair`, so that a short transfer can check the rates.

  Args:
    links: The links of all nodes.

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
    network = ThrottledNetwork(len(links.nodes), root)
    root.bridge(_SWITCH)
    switches = {}
    for number, (nodes, link) in enumerate(links.uplinks):
      site = f"site{number}"
      root.make(site)
      root.bridge(site)
      _connect(root, _SWITCH, site, site)
      root.run(site, *f"ip link set {INTERFACE} master bridge up".split())
      _throttle(root, site, site, link, _SHARED_QUEUE_S + link.rtt_s)
      switches |= dict.fromkeys(nodes, site)
    for number, link in enumerate(links.nodes):
      address, port = network.addresses[number], f"port{number}"
      root.make(address)
      _connect(root, switches.get(number, _SWITCH), address, port)
      for command in (
        "ip link set lo up",
        f"ip addr add {address}/24 dev {INTERFACE}",
        f"ip link set {INTERFACE} up",
        f"ip route change {_SUBNET} dev {INTERFACE} congctl reno",
      ):
        root.run(address, *command.split())
      if link:
        network.throttle(number, link)
    yield network


def _connect(root: "_Root", switch: str, name: str, port: str) -> None:
  """Joins a namespace with a port of a switch."""
  pid = root.pids[name]
  for command in (
    f"ip link add {port} type veth peer name {INTERFACE} netns {pid}",
    f"ip link set {port} master bridge up",
  ):
    root.run(switch, *command.split())


def _throttle(
  root: "_Root",
  name: str,
  port: str,
  link: NodeLink,
  queue_s: float = _QUEUE_S,
) -> None:
  """Throttles the link between a namespace and its port of the switch.

  Args:
    root: Runs commands in namespaces.
    name: Host name of the namespace.
    port: The switch's end of the link.
    link: The rates.
    queue_s: Longest wait of a packet (seconds).
  """
  directions = (
    (name, INTERFACE, link.up_bit_per_s),
    (_SWITCH, port, link.down_bit_per_s),
  )
  for space, device, bit_per_s in directions:
    burst = max(_LEAST_BURST_BYTES, round(bit_per_s / 8 * _BURST_S))
    rate = ("rate", f"{round(bit_per_s)}bit", "burst", str(burst))
    root.run(
      space,
      *("tc", "qdisc", "replace", "dev", device, "root", "handle", "1:"),
      *("tbf", *rate, "latency", f"{queue_s * 1e6:.0f}us"),
    )


def _impair(root: "_Root", name: str, port: str, link: NodeLink) -> None:
  """Adds the delay and the loss of a throttled link."""
  directions = (
    (name, INTERFACE, link.rtt_s / 2),
    (_SWITCH, port, 0.0),
  )
  for space, device, delay_s in directions:
    if delay_s or link.loss:
      command = ("tc", "qdisc", "replace", "dev", device, "parent", "1:1")
      root.run(space, *command, *_netem(delay_s, link.loss))


def _netem(delay_s: float, loss: float) -> list[str]:
  """Returns the words for tc that delay and lose packets."""
  words = ["netem", "limit", str(_NETEM_PACKETS)]
  if delay_s:
    words += ["delay", f"{delay_s * 1e6:.0f}us"]
  if loss:
    words += ["loss", f"{loss:.6%}"]
  return words


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

  def bridge(self, name: str) -> None:
    """Makes a namespace a switch."""
    self.run(name, *"ip link add bridge type bridge".split())
    self.run(name, *"ip link set bridge up".split())

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
    if found.returncode and "netem" in command:
      raise UsageError(
        "this machine's kernel cannot delay or lose packets (tc netem: "
        f"{found.stderr.strip()}): leave round trips and losses out (write "
        "'rtt': '0 ms' in a cluster file), or take a kernel with sch_netem"
      )
    if found.returncode:
      raise UsageError(
        f"this machine cannot throttle links: {' '.join(command)} failed "
        f"({found.stderr.strip()})"
      )


def _end(holder: subprocess.Popen) -> None:
  holder.kill()
  holder.communicate()
