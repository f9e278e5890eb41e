"""Measures a throttled link by a short transfer before it is relied on.

  python -m experiments.runtime.link_check receive PORT
  python -m experiments.runtime.link_check send ADDRESS PORT BYTES

The receiver prints the port once it listens, and then the bits a second that
reached it from the first byte to the last.
"""

import math
import socket
import subprocess
import sys
import time

from experiments.runtime.command_line import UsageError
from experiments.runtime.throttled_network import Links, ThrottledNetwork

_TRANSFER_S = 0.6
_CHUNK_BYTES = 65_536
_TOLERANCE = 0.03
_TRIES = 3  # A busy machine may disturb a transfer of less than a second.
# Share of a full Ethernet frame that TCP hands on: 1448 bytes of 1514.
GOODPUT = 1448 / 1514


def check(network: ThrottledNetwork, links: Links) -> list[float]:
  """Measures the link from every node to the next one.

  Args:
    network: The network.
    links: The rates that it should have.

  Returns:
    Measured payload in bits a second over what TCP should reach, by node. Nodes
    that share an uplink with the next one are left out.

  Raises:
    UsageError: If a link is off by more than 3 % three times in a row.
  """
  ratios = []
  for node in range(len(links.nodes)):
    peer = (node + 1) % len(links.nodes)
    wanted = GOODPUT * links.between(node, peer)
    if math.isinf(wanted):
      continue
    for _ in range(_TRIES):
      ratio = _transfer(network, node, peer, wanted) / wanted
      if abs(ratio - 1) <= _TOLERANCE:
        break
    else:
      raise UsageError(
        f"the link from node {node} to node {peer} carries {ratio:.2f} "
        "times its rate, so nothing was run: free the machine or take a lower "
        "rate"
      )
    ratios.append(ratio)
  return ratios


def _transfer(
  network: ThrottledNetwork, sender: int, receiver: int, bit_per_s: float
) -> float:
  """Returns the bits a second of one transfer."""
  module = [sys.executable, "-m", "experiments.runtime.link_check"]
  listening = subprocess.Popen(
    network.command(receiver, [*module, "receive", "0"]),
    stdout=subprocess.PIPE,
    text=True,
  )
  with listening:
    assert listening.stdout
    port = listening.stdout.readline().strip()
    num_bytes = str(max(4 * _CHUNK_BYTES, round(bit_per_s / 8 * _TRANSFER_S)))
    address = network.addresses[receiver]
    try:
      subprocess.run(
        network.command(sender, [*module, "send", address, port, num_bytes]),
        check=True,
        stderr=subprocess.PIPE,
        text=True,
      )
      return float(listening.stdout.readline())
    except subprocess.CalledProcessError as error:
      *_, reason = ["unknown", *error.stderr.splitlines()]
      raise UsageError(
        f"nothing passes the link from node {sender} to node {receiver}, so "
        f"nothing was run ({reason})"
      ) from error
    finally:
      listening.kill()  # It would wait for ever for a sender that failed.


def send(address: str, port: int, num_bytes: int) -> None:
  """Sends zeros to a receiver."""
  with socket.create_connection((address, port)) as connection:
    connection.sendall(bytes(num_bytes))


def receive(port: int) -> None:
  """Receives one transfer; prints the port, then the bits a second."""
  with socket.create_server(("", port)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    with connection:
      connection.recv(_CHUNK_BYTES)
      start = time.perf_counter()
      # The first bytes came before the clock was started.
      num_bytes = 0
      while chunk := connection.recv(_CHUNK_BYTES):
        num_bytes += len(chunk)
      print(8 * num_bytes / (time.perf_counter() - start), flush=True)


if __name__ == "__main__":
  if sys.argv[1] == "send":
    send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
  else:
    receive(int(sys.argv[2]))
