"""Links with limited rates, delays and losses between processes of one machine.

A process runs on a *node*: a network namespace with one link to a switch, which
is a namespace too. The kernel limits the rate on the node's side for what
leaves the node, and on the switch's side for what reaches the node:

    node 0 (10.77.0.1) --up--> switch --down--> node 1 (10.77.0.2)

At each end of a node's link there is a queue for each other node, and the
queues send in turn, so that large messages do not block small ones. Half of a
link's round trip is added where a packet leaves a node. A packet may be lost on
the sender's link and on the receiver's.

The network is apart from the machine's own, and ends with the process that made
it. Without root, all namespaces lie inside a user namespace.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from dilocox_jax.simulate.cluster import Link
from experiments.runtime.command_line import UsageError
from experiments.runtime.ends_with_parent import ending_with_this_process

INTERFACE = "wan"  # The end of its link on a node.
_SWITCH = "switch"
_SUBNET = "10.77.0.0/24"
_TOOLS = ("ip", "tc", "unshare", "nsenter")
# A link that was idle may at once send the bytes that it carries in this time.
_BURST_S = 0.0005
_LEAST_BURST_BYTES = 16_384  # A burst must hold several packets.
# TCP hands packets of up to 64 kB to a link, and other packets would wait until
# each has left. This limit is below any burst, headers included.
_PACKET_BYTES = 14_000
_TURN_BYTES = 15_000  # Bytes that a queue may send in its turn: a large packet.
_NETEM_PACKETS = 100_000  # Most packets under way; 150 MB of full frames.
_QUEUE_S = 0.05  # Longest wait in a link's queue; later packets are dropped.
# The holder of a namespace prints a line as soon as the namespace is there. The
# name of the host is its address, because gloo finds the address to listen on
# by that name.
_HOLD = """
import signal, socket, sys
socket.sethostname(sys.argv[1])
print("ready", flush=True)
signal.pause()
"""


@contextlib.contextmanager
def throttled_network(links: Sequence[Link]) -> Iterator["ThrottledNetwork"]:
  """Makes a network of throttled links. It ends when the `with` block ends.

  Delays and losses begin only with `ThrottledNetwork.impair`, so that the rates
  can be checked before. There must be at least two links, one for each node.
  Their rates must be finite.

  Raises:
    UsageError: If this machine or user may not make network namespaces, or
      lacks a program or a part of the kernel that they need.
  """
  missing = [tool for tool in _TOOLS if not shutil.which(tool)]
  if missing:
    raise UsageError(
      f"throttled links need the program {missing[0]}, which is not installed: "
      "install iproute2 and util-linux, or leave the link out"
    )
  # A namespace exists as long as a process inside it. Its *holder* is a process
  # that only sleeps there.
  with contextlib.ExitStack() as stack:
    yield ThrottledNetwork(links, stack)


class ThrottledNetwork:
  """Network namespaces of this machine that are joined by throttled links.

  Attributes:
    links: The link with which each node was made, in order.
    addresses: Address of each node, in order.
  """

  def __init__(self, links: Sequence[Link], stack: contextlib.ExitStack):
    """Makes the nodes and their links. The network ends when `stack` closes."""
    self.links = list(links)
    self.addresses = [f"10.77.0.{node + 1}" for node in range(len(links))]
    self._stack = stack
    # Process ids of the holders (the processes that keep the network namespaces
    # of the nodes and of the switch), by host name.
    self._pids: dict[str, int] = {}
    self._is_root = os.geteuid() == 0
    # Options of nsenter: without root, all namespaces lie in the user namespace
    # that the switch's holder makes here.
    self._enter_options: list[str] = []
    unshare = ["unshare"]
    if not self._is_root:
      self._enter_options = ["--user", "--preserve-credentials"]
      unshare += ["--user", "--map-root-user"]
    self._hold(_SWITCH, unshare)
    if any(link.rtt_s or link.loss for link in links):
      self._check_netem()
    self._run(_SWITCH, "ip link add bridge type bridge")
    self._run(_SWITCH, "ip link set bridge up")
    for node, link in enumerate(links):
      self._connect(node)
      self.throttle(node, link)

  def command(self, node: int, command: Sequence[str]) -> list[str]:
    """Returns the command line that runs a command on a node.

    The command is killed when the thread that started it ends.
    """
    return self._inside(self.addresses[node], ending_with_this_process(command))

  def throttle(self, node: int, link: Link) -> None:
    """Sets the rates of a node's link to those of `link`.

    The node's link may be in use. Delay and loss that `impair` has added to it
    are removed. The attribute `links` stays as it is.
    """
    num_others = len(self.links) - 1
    for space, device, bps, _ in self._ends(node, link):
      # `burst` bytes may leave an idle link at once. A queue drops the packets
      # that would make it longer than `queue_bytes`.
      burst = max(_LEAST_BURST_BYTES, round(bps / 8 * _BURST_S))
      queue_bytes = max(4 * _LEAST_BURST_BYTES, round(bps / 8 * _QUEUE_S))
      # Class ffff limits the whole link. Each queue is a class below it.
      lines = [
        f"class replace dev {device} parent 1: classid 1:ffff htb "
        f"rate {round(bps)}bit burst {burst}b cburst {burst}b"
      ]
      for queue in range(1, num_others + 1):
        # A queue that was idle may send its `burst` before the others. A burst
        # of one turn lets a small message pass at once, and gives no queue a
        # longer lead.
        lines += [
          f"class replace dev {device} parent 1:ffff classid 1:{queue:x} htb "
          f"rate {round(bps / num_others)}bit ceil {round(bps)}bit "
          f"burst {_TURN_BYTES}b cburst {burst}b quantum {_TURN_BYTES}",
          f"qdisc replace dev {device} parent 1:{queue:x} bfifo "
          f"limit {queue_bytes}",
        ]
      self._tc(space, lines)

  def impair(self) -> None:
    """Adds the delay and the loss of each link in `links`.

    A later `throttle` of a link removes its delay and loss.
    """
    for node, link in enumerate(self.links):
      for space, device, _, delay_s in self._ends(node, link):
        words = f"netem limit {_NETEM_PACKETS}"
        words += f" delay {delay_s * 1e6:.0f}us" if delay_s else ""
        words += f" loss {link.loss:.6%}" if link.loss else ""
        if delay_s or link.loss:
          # netem takes the place of each queue's bfifo (`throttle`).
          lines = [
            f"qdisc replace dev {device} parent 1:{queue:x} {words}"
            for queue in range(1, len(self.links))
          ]
          self._tc(space, lines)

  def _check_netem(self) -> None:
    """Raises UsageError if the kernel cannot delay and lose packets (netem)."""
    try:
      self._run(_SWITCH, "tc qdisc add dev lo root netem")
      self._run(_SWITCH, "tc qdisc del dev lo root")
    except UsageError as error:
      raise UsageError(
        "this kernel has no netem, which delays and loses packets: leave out "
        f"--rtt and --loss ({error})"
      ) from error

  def _ends(
    self, node: int, link: Link
  ) -> Iterator[tuple[str, str, float, float]]:
    """Yields both ends of a node's link: the node's device, and the switch's.

    An end is the host name of its namespace, the name of the device, the rate
    (bit/s) and the delay (seconds) of what it sends.
    """
    yield self.addresses[node], INTERFACE, link.up_bps, link.rtt_s / 2
    yield _SWITCH, f"port{node}", link.down_bps, 0.0

  def _connect(self, node: int) -> None:
    """Makes a node (a network namespace), and connects it with the switch.

    Filters at both ends of the link sort packets into queues: one queue for
    each of the other nodes. `throttle` makes these queues.
    """
    address = self.addresses[node]
    port = f"port{node}"
    unshare = ["unshare"]
    # Without root, the node's namespace must lie in the switch's user
    # namespace.
    if not self._is_root:
      target = f"--target={self._pids[_SWITCH]}"
      unshare = ["nsenter", target, *self._enter_options, "unshare"]
    self._hold(address, unshare)
    node_end = f"peer name {INTERFACE} netns {self._pids[address]}"
    self._run(_SWITCH, f"ip link add {port} type veth {node_end}")
    for space, command in (
      (_SWITCH, f"ip link set {port} master bridge up"),
      (address, "ip link set lo up"),
      (address, f"ip addr add {address}/24 dev {INTERFACE}"),
      (address, f"ip link set {INTERFACE} up"),
      # Reno keeps a throttled link full, and every kernel has it. BBR, the
      # default of some machines, took 5 to 18 % longer (measured).
      (address, f"ip route change {_SUBNET} dev {INTERFACE} congctl reno"),
    ):
      self._run(space, command)
    # With one queue for all nodes an all-reduce took 6 to 20 % longer
    # (measured): small messages of one node waited behind the data of another.
    # So each end has a queue for each other node. On the node's end, the queue
    # has the packets to that other node, and on the switch's end the packets
    # from it.
    peers = [peer for peer in self.addresses if peer != address]
    sides = (address, INTERFACE, "dst"), (_SWITCH, port, "src")
    for space, device, side in sides:
      limit_packets = f"ip link set dev {device} gso_max_size {_PACKET_BYTES}"
      self._run(space, limit_packets)
      filters = [
        f"filter add dev {device} protocol ip parent 1: prio 1 u32 "
        f"match ip {side} {peer} flowid 1:{queue:x}"
        for queue, peer in enumerate(peers, 1)
      ]
      self._tc(space, [f"qdisc add dev {device} root handle 1: htb", *filters])

  def _hold(self, name: str, unshare: Sequence[str]) -> None:
    """Starts a sleeping process that holds a new network namespace open.

    `name` becomes the host name inside it. `unshare` is the beginning of the
    command line. Raises UsageError if this machine or user may not make
    namespaces.
    """
    hold = ending_with_this_process([sys.executable, "-c", _HOLD, name])
    holder = subprocess.Popen(
      [*unshare, "--net", "--uts", *hold],
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    self._stack.callback(holder.communicate)
    # The stack calls the last callback first: it kills, and then waits.
    self._stack.callback(holder.kill)
    assert holder.stdout and holder.stderr
    if not holder.stdout.readline():
      reason = holder.stderr.read().strip().splitlines()[-1:]
      raise UsageError(
        f"this machine lets you make no network namespaces ({''.join(reason)}):"
        " run as root, or leave the link out"
      )
    self._pids[name] = holder.pid

  def _inside(self, name: str, command: Sequence[str]) -> list[str]:
    """Returns the command line that runs a command in a namespace.

    `name` is the host name of the namespace.
    """
    target = f"--target={self._pids[name]}"
    enter = ["nsenter", target, *self._enter_options, "--net", "--uts"]
    return [*enter, *command]

  def _tc(self, name: str, lines: Sequence[str]) -> None:
    """Runs commands of tc, given without the word "tc", in a namespace."""
    self._run(name, "tc -batch -", "\n".join(lines) + "\n")

  def _run(self, name: str, command: str, stdin: str = "") -> None:
    """Runs a command in a namespace to its end.

    Raises:
      UsageError: If the command fails.
    """
    inside = self._inside(name, command.split())
    process = subprocess.run(
      inside, input=stdin, capture_output=True, text=True
    )
    if process.returncode:
      raise UsageError(
        f"this machine cannot throttle links: {command} failed "
        f"({process.stderr.strip()})"
      )
