"""A queue for every pair of nodes on a throttled link, served in turn.

In one queue for all, the small messages of one node wait behind the data of
another: an all-reduce between two sites took 6 to 20 % longer, depending on the
queue's length (measured). Real routers let them pass (fair queueing). Here
`htb` serves the queues in turn and limits nothing, since the `tbf` above it
already does:

    tbf 1:  the link's rate
      htb 2:  queue 2:1 (node 0 to node 1), queue 2:2 (node 0 to node 2), ...

The functions return lines for `tc -batch`.
"""

from collections.abc import Sequence

Pair = tuple[str, str]  # Address of the sender and of the receiver.
_NO_LIMIT = "30gbit"  # Far above any rate that the kernel's `tbf` lets pass.
_MOST = f"ceil {_NO_LIMIT} cburst 1m"
_TURN_BYTES = 15_000  # What a queue may send in its turn: a large packet.


def queue_lines(device: str, pairs: Sequence[Pair]) -> list[str]:
  """Returns what tells the pairs' packets apart on a device.

  The queues themselves come from `share_lines`.

  Args:
    device: The device that sends; `tbf` throttles it as 1:.
    pairs: Nodes whose packets leave by this device.
  """
  lines = [
    f"qdisc replace dev {device} parent 1:1 handle 2: htb",
    f"class replace dev {device} parent 2: classid 2:ffff htb "
    f"rate {_NO_LIMIT} burst 1m {_MOST}",
  ]
  for handle, (sender, receiver) in zip(
    queue_handles(len(pairs)), pairs, strict=True
  ):
    lines.append(
      f"filter add dev {device} protocol ip parent 2: prio 1 u32 "
      f"match ip src {sender} match ip dst {receiver} flowid {handle}"
    )
  return lines


def share_lines(device: str, count: int, bit_per_s: float) -> list[str]:
  """Returns what gives each pair a queue with an even share of the link.

  A queue is served first until it has its share, and the rest is lent in turn.
  So who sends little, such as a notice, never waits for who sends much.

  Args:
    device: The device that sends.
    count: Number of pairs.
    bit_per_s: Rate of the link.
  """
  # What a queue has saved goes first, so it may save one turn and no more.
  share = f"rate {round(bit_per_s / count)}bit burst {_TURN_BYTES}b {_MOST}"
  return [
    f"class replace dev {device} parent 2:ffff classid {handle} htb "
    f"{share} quantum {_TURN_BYTES}"
    for handle in queue_handles(count)
  ]


def limit_lines(device: str, count: int, limit_bytes: int) -> list[str]:
  """Returns what limits how much each queue of a device holds.

  What comes to a full queue is dropped.

  Args:
    device: The device that sends.
    count: Number of pairs.
    limit_bytes: Bytes that a queue holds.
  """
  return [
    f"qdisc replace dev {device} parent {queue} bfifo limit {limit_bytes}"
    for queue in queue_handles(count)
  ]


def queue_handles(count: int) -> list[str]:
  """Returns where tc finds each pair's queue; one pair has the link's own."""
  if count == 1:
    return ["1:1"]
  return [f"2:{number:x}" for number in range(1, count + 1)]
