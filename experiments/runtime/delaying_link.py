"""Joins a node and a switch by a link that delays and loses packets.

  python -m experiments.runtime.delaying_link PID PORT INTERFACE

It stands for the kernel's netem where the kernel has none. It runs in the
network namespace of the switch, makes the interface PORT there and INTERFACE in
the namespace of the process PID, and carries frames from one to the other. Each
line "SECONDS SHARE" on standard input says anew how long frames from the node
wait, and which share of all frames is lost. Python carries some ten thousand
frames a second, enough for links of 100 Mbit/s.
"""

import collections
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time

_SET_INTERFACE = 0x400454CA  # TUNSETIFF of linux/if_tun.h.
_FRAMES = 0x1002  # IFF_TAP | IFF_NO_PI: whole frames, with nothing in front.
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of linux/sched.h.
_FRAME_BYTES = 65_536
_AT_ONCE = 32  # Frames of one side that are read before the other's turn.


def main(pid: str, port: str, interface: str) -> None:
  """Makes both interfaces, says so, and carries frames until it is ended.

  Args:
    pid: Process in the node's network namespace.
    port: Name of the interface in this namespace.
    interface: Name of the interface in the node's.
  """
  switch = _interface(port)
  libc = ctypes.CDLL(None, use_errno=True)
  with open(f"/proc/{pid}/ns/net") as space:
    if libc.setns(space.fileno(), _NEW_NETWORK):
      raise OSError(ctypes.get_errno(), "setns")
  node = _interface(interface)
  print("ready", flush=True)
  carry(node, switch, sys.stdin.fileno())


def _interface(name: str) -> int:
  """Makes a network interface; returns the file that holds its frames."""
  file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
  request = struct.pack("16sH22x", name.encode(), _FRAMES)
  fcntl.ioctl(file, _SET_INTERFACE, request)
  return file


def carry(node: int, switch: int, orders: int) -> None:
  """Carries frames until `orders` has ended.

  Args:
    node: File of the node's interface, whose frames wait.
    switch: File of the switch's interface.
    orders: File with the lines that say how long, and what share is lost.
  """
  delay_s, loss = 0.0, 0.0
  waiting: collections.deque[tuple[float, bytes]] = collections.deque()
  draw = random.Random(0).random
  while True:
    timeout_s = None
    if waiting:
      timeout_s = max(0.0, waiting[0][0] - time.monotonic())
    ready, _, _ = select.select([node, switch, orders], [], [], timeout_s)
    if orders in ready:
      line = os.read(orders, 1000)
      if not line:
        return
      delay_s, loss = map(float, line.split()[-2:])
    now = time.monotonic()
    if node in ready:
      waiting += ((now + delay_s, frame) for frame in _frames(node))
    if switch in ready:
      for frame in _frames(switch):
        _send(node, frame, draw() < loss)
    while waiting and waiting[0][0] <= now:
      _send(switch, waiting.popleft()[1], draw() < loss)


def _frames(file: int) -> list[bytes]:
  """Returns some of the frames that are there."""
  frames = []
  for _ in range(_AT_ONCE):
    try:
      frames.append(os.read(file, _FRAME_BYTES))
    except BlockingIOError:
      break
  return frames


def _send(file: int, frame: bytes, is_lost: bool) -> None:
  if is_lost:
    return
  try:
    os.write(file, frame)
  except OSError:
    pass  # The interface is down or full; a link loses such a frame.


if __name__ == "__main__":
  main(*sys.argv[1:])
