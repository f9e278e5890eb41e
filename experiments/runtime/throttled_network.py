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

Every pair of nodes has a queue of its own on a link, and they are served in
turn (`fair_queues`), as the simulator shares a link.

TCP controls congestion by Reno on these links, whatever the machine prefers.
Every kernel has it, and it keeps a throttled link full. BBR, the default of
some machines, sends less now and then to measure the round trip, and took 5 to
18 % longer (measured).

Half of the round trip is added where a packet leaves, and a packet may be lost
at each end, as the simulator counts it (`simulate.cluster.Link`). The kernel's
`netem` does this. Some kernels lack it, and there a process carries the packets
of such a link (`delaying_link`), up to some 100 Mbit/s.

Nothing is left behind when the launcher ends, however it ends, and the
machine's own network is never touched (`namespaces`).
"""

import contextlib
import math
import shutil
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dilocox_jax.distributed import link_counter
from experiments.runtime.command_line import UsageError
from experiments.runtime.fair_queues import (
  Pair,
  limit_lines,
  queue_handles,
  queue_lines,
  share_lines,
)
from experiments.runtime.namespaces import INTERFACE, SWITCH, Namespaces

_SUBNET = "10.77.0.0/24"
_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
_BURST_S = 0.0005  # Time at full rate that a link which has rested catches up.
_LEAST_BURST_BYTES = 16_384  # A burst must hold several packets.
# TCP hands packets of many segments to a link, up to 64 kB. One that waits
# while the link becomes slower, so that a burst is shorter than it, would never
# leave, and nothing behind it. With headers these stay below any burst.
_PACKET_BYTES = 14_000
_NETEM_PACKETS = 100_000  # Most packets under way; 150 MB of full frames.
_QUEUE_S = 0.05  # Longest wait in a link's queue; what comes then is dropped.


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

  def __init__(self, num_nodes: int, root: Namespaces):
    """Names the nodes without making anything.

    Args:
      num_nodes: Number of nodes.
      root: Makes namespaces and runs commands in them.
    """
    self.addresses = [f"10.77.0.{number + 1}" for number in range(num_nodes)]
    self._root = root
    # Namespaces and devices whose queues delay or lose packets.
    self._delayed: set[tuple[str, str]] = set()

  def command(self, node: int, command: Sequence[str]) -> list[str]:
    """Returns the command line that runs a command on a node.

    Args:
      node: Number of the node, from 0.
      command: Command line, one string for each argument.
    """
    return self._root.inside(self.addresses[node], command)

  def throttle(self, node: int, link: NodeLink) -> None:
    """Sets the rates of a node's own link, also while it is in use."""
    count = len(self.pairs([node]))
    self._throttle(self.addresses[node], f"port{node}", link, count)

  def share(self, name: str, port: str, link: NodeLink, pairs: Sequence[Pair]):
    """Throttles a new link, and shares it evenly between the pairs of nodes.

    Args:
      name: Host name of the namespace at its end.
      port: The switch's end.
      link: The rates.
      pairs: Who sends to whom from that end.
    """
    self._throttle(name, port, link, 1)
    if len(pairs) > 1:
      back = [(receiver, sender) for sender, receiver in pairs]
      self._root.tc(name, queue_lines(INTERFACE, pairs))
      self._root.tc(SWITCH, queue_lines(port, back))
      self._throttle(name, port, link, len(pairs))

  def _throttle(self, name: str, port: str, link: NodeLink, count: int) -> None:
    """Sets the rates of a link on which so many pairs have a queue."""
    for space, device, bit_per_s, _ in _directions(name, port, link):
      burst = max(_LEAST_BURST_BYTES, round(bit_per_s / 8 * _BURST_S))
      lines = [
        f"qdisc replace dev {device} root handle 1: tbf rate "
        f"{round(bit_per_s)}bit burst {burst} latency {_QUEUE_S * 1e6:.0f}us"
      ]
      if count > 1:
        lines += share_lines(device, count, bit_per_s)
      # A queue that delays packets holds as many as are under way.
      if count > 1 and (space, device) not in self._delayed:
        held = max(_LEAST_BURST_BYTES, round(bit_per_s / 8 * _QUEUE_S))
        lines += limit_lines(device, count, held)
      self._root.tc(space, lines)

  def pairs(self, nodes: Sequence[int]) -> list[Pair]:
    """Returns who sends to whom from some nodes to all others."""
    own = [self.addresses[node] for node in nodes]
    others = [each for each in self.addresses if each not in own]
    return [(sender, receiver) for sender in own for receiver in others]

  def impair(self, links: Links) -> None:
    """Adds delays and losses to links that are throttled already."""
    for number, (nodes, link) in enumerate(links.uplinks):
      self._impair(f"site{number}", f"site{number}", link, nodes)
    for node, link in enumerate(links.nodes):
      if link:
        self._impair(self.addresses[node], f"port{node}", link, [node])

  def _impair(
    self, name: str, port: str, link: NodeLink, nodes: Sequence[int]
  ) -> None:
    """Adds the delay and the loss of a link, in each of its queues."""
    for space, device, _, delay_s in _directions(name, port, link):
      if delay_s or link.loss:
        self._delayed.add((space, device))
        words = _netem(delay_s, link.loss)
        self._root.tc(
          space,
          [
            f"qdisc replace dev {device} parent {queue} {words}"
            for queue in queue_handles(len(self.pairs(nodes)))
          ],
        )

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
    root = Namespaces(stack)
    network = ThrottledNetwork(len(links.nodes), root)
    root.bridge(SWITCH)
    switches = {}
    for number, (nodes, link) in enumerate(links.uplinks):
      site = f"site{number}"
      root.make(site)
      root.bridge(site)
      _connect(root, SWITCH, site, site, link)
      root.run(site, *f"ip link set {INTERFACE} master bridge up".split())
      network.share(site, site, link, network.pairs(nodes))
      switches |= dict.fromkeys(nodes, site)
    for number, link in enumerate(links.nodes):
      address, port = network.addresses[number], f"port{number}"
      root.make(address)
      _connect(root, switches.get(number, SWITCH), address, port, link)
      for command in (
        "ip link set lo up",
        f"ip addr add {address}/24 dev {INTERFACE}",
        f"ip link set {INTERFACE} up",
        f"ip route change {_SUBNET} dev {INTERFACE} congctl reno",
      ):
        root.run(address, *command.split())
      if link:
        network.share(address, port, link, network.pairs([number]))
    yield network


def _connect(
  root: Namespaces, switch: str, name: str, port: str, link: NodeLink | None
) -> None:
  """Joins a namespace with a port of a switch.

  Args:
    root: Makes interfaces.
    switch: Host name of the switch's namespace.
    name: Host name of the namespace.
    port: Name for the switch's end.
    link: The link; None if it has no limits.
  """
  if link and (link.rtt_s or link.loss) and not root.has_netem:
    raise UsageError(
      "this machine cannot delay or lose packets, as its kernel lacks netem: "
      "leave round trips and losses out (write 'rtt': '0 ms' in a cluster file)"
    )
  peer = f"peer name {INTERFACE} netns {root.pids[name]}"
  root.run(switch, *f"ip link add {port} type veth {peer}".split())
  root.run(switch, *f"ip link set {port} master bridge up".split())
  if link:
    for space, device in ((name, INTERFACE), (switch, port)):
      size = f"ip link set dev {device} gso_max_size {_PACKET_BYTES}"
      root.run(space, *size.split())


def _directions(
  name: str, port: str, link: NodeLink
) -> Iterator[tuple[str, str, float, float]]:
  """Yields namespace, device, rate and delay of what sends into a link."""
  yield name, INTERFACE, link.up_bit_per_s, link.rtt_s / 2
  yield SWITCH, port, link.down_bit_per_s, 0.0


def _netem(delay_s: float, loss: float) -> str:
  """Returns the words for tc that delay and lose packets."""
  words = f"netem limit {_NETEM_PACKETS}"
  if delay_s:
    words += f" delay {delay_s * 1e6:.0f}us"
  if loss:
    words += f" loss {loss:.6%}"
  return words
