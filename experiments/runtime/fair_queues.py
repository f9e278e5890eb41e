"""A queue for every pair of nodes on a throttled link, served in turn.

In one queue for all, the small messages of one node wait behind the data of
another: an all-reduce between two sites took 6 to 20 % longer, depending on the
queue's length (docs/log.md). Real routers let them pass (fair queueing). Here
`htb` serves the queues in turn and limits nothing, since the `tbf` above it
already does:

    tbf 1:  the link's rate
      htb 2:  queue 2:1 (node 0 to node 1), queue 2:2 (node 0 to node 2), ...
"""

from collections.abc import Sequence

from experiments.runtime.namespaces import Namespaces

Pair = tuple[str, str]  # Address of the sender and of the receiver.
_NO_LIMIT = "30gbit"  # Far above any rate that the kernel's `tbf` lets pass.
_TURN_BYTES = 15_000  # What a queue may send in its turn: a large packet.


def make_queues(
  root: Namespaces, space: str, device: str, pairs: Sequence[Pair]
) -> None:
  """Gives every pair a queue on a device that `tbf` throttles as 1:.

  Args:
    root: Runs commands in namespaces.
    space: Host name of the namespace.
    device: The device that sends.
    pairs: Nodes whose packets leave by this device.
  """
  most = f"ceil {_NO_LIMIT} burst 1m cburst 1m"
  _tc(root, space, "qdisc", device, "parent 1:1 handle 2: htb")
  whole = f"parent 2: classid 2:ffff htb rate {_NO_LIMIT} {most}"
  _tc(root, space, "class", device, whole)
  for number, (sender, receiver) in enumerate(pairs, start=1):
    # A small guaranteed rate: the rest is borrowed, in turn.
    handle = f"2:{number:x}"
    own = f"parent 2:ffff classid {handle} htb rate 1mbit {most}"
    _tc(root, space, "class", device, f"{own} quantum {_TURN_BYTES}")
    ends = f"match ip src {sender} match ip dst {receiver}"
    rule = f"protocol ip parent 2: prio {number} u32 {ends} flowid {handle}"
    _tc(root, space, "filter", device, rule)


def limit_queues(
  root: Namespaces, space: str, device: str, count: int, limit_bytes: int
) -> None:
  """Sets how much each of a device's queues holds; what comes then is dropped.

  Args:
    root: Runs commands in namespaces.
    space: Host name of the namespace.
    device: The device that sends.
    count: Number of pairs.
    limit_bytes: Bytes that a queue holds.
  """
  for queue in queue_handles(count):
    words = f"parent {queue} bfifo limit {limit_bytes}"
    _tc(root, space, "qdisc", device, words)


def queue_handles(count: int) -> list[str]:
  """Returns where tc finds each pair's queue; one pair has the link's own."""
  if count == 1:
    return ["1:1"]
  return [f"2:{number:x}" for number in range(1, count + 1)]


def _tc(
  root: Namespaces, space: str, kind: str, device: str, words: str
) -> None:
  root.run(space, "tc", kind, "replace", "dev", device, *words.split())
