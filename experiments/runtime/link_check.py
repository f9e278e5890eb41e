"""Measures throttled links by short transfers before they are relied on.

  python -m experiments.runtime.link_check [ADDRESS BYTES]

With arguments it sends, without it receives, and prints a line when it listens
and then the bits a second that reached it from the first byte to the last.
"""

import socket
import subprocess
import sys
import time

from experiments.runtime.command_line import UsageError
from experiments.runtime.throttled_links import ThrottledNetwork

_PORT = 9875  # Every port of a network of one's own is free.
_TRANSFER_S = 0.6
_CHUNK_BYTES = 65_536
_TOLERANCE = 0.03
_TRIES = 3  # A busy machine may disturb a transfer of less than a second.
# Share of a full Ethernet frame that TCP hands on: 1448 bytes of 1514.
_GOODPUT = 1448 / 1514


def check(network: ThrottledNetwork) -> list[float]:
  """Measures the link from every node to the next one, and says how fast it is.

  Args:
    network: The network.

  Returns:
    Measured payload in bits a second over what TCP should reach, by node.

  Raises:
    UsageError: If a link is off by more than 3 % three times in a row.
  """
  count = len(network.links)
  ratios = [checked_ratio(network, node) for node in range(count)]
  print(
    f"links: {count}, measured {min(ratios):.3f} to {max(ratios):.3f} times "
    "their rates less headers",
    flush=True,
  )
  return ratios


def checked_ratio(network: ThrottledNetwork, node: int) -> float:
  """Returns what `check` does for one node, or raises its error."""
  peer = (node + 1) % len(network.links)
  slower = min(network.links[node].up_bps, network.links[peer].down_bps)
  expected_bps = _GOODPUT * slower
  ratio = 0.0
  for _ in range(_TRIES):
    ratio = transfer_bps(network, node, peer, expected_bps) / expected_bps
    if abs(ratio - 1) <= _TOLERANCE:
      return ratio
  raise UsageError(
    f"the link from node {node} to node {peer} carries {ratio:.2f} times its "
    "rate, so nothing was run: free the machine or take a lower rate"
  )


def transfer_bps(
  network: ThrottledNetwork, sender: int, receiver: int, expected_bps: float
) -> float:
  """Returns the bits a second of one transfer of about 0.6 s."""
  module = [sys.executable, "-m", "experiments.runtime.link_check"]
  with subprocess.Popen(
    network.command(receiver, module), stdout=subprocess.PIPE, text=True
  ) as listening:
    assert listening.stdout
    listening.stdout.readline()
    size = max(4 * _CHUNK_BYTES, round(expected_bps / 8 * _TRANSFER_S))
    given = [network.addresses[receiver], str(size)]
    sent = subprocess.run(
      network.command(sender, [*module, *given]),
      stderr=subprocess.PIPE,
      text=True,
    )
    if sent.returncode:
      listening.kill()  # It would wait for ever.
      *_, reason = ["unknown", *sent.stderr.splitlines()]
      raise UsageError(
        f"nothing passes the link from node {sender} to node {receiver}, so "
        f"nothing was run ({reason})"
      )
    return float(listening.stdout.readline())


def receive() -> None:
  """Receives one transfer; prints that it listens, then the bits a second."""
  with socket.create_server(("", _PORT)) as server:
    print("listening", flush=True)
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
  if len(sys.argv) > 1:
    with socket.create_connection((sys.argv[1], _PORT)) as sender:
      sender.sendall(bytes(int(sys.argv[2])))
  else:
    receive()
