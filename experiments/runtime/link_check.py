"""Measures throttled links by short transfers, before a program relies on them.

  python -m experiments.runtime.link_check [ADDRESS BYTES]

Both ends of a transfer run this module: with arguments it sends, without
arguments it receives and prints the rate (bit/s).
"""

import socket
import subprocess
import sys
import time

from experiments.runtime.command_line import UsageError
from experiments.runtime.throttled_links import ThrottledNetwork

_PORT = 9875  # In a new network namespace every port is free.
_TRANSFER_S = 0.6  # About the duration of a transfer.
_CHUNK_BYTES = 65_536  # Largest number of bytes that are read at once.
_TOLERANCE = 0.03  # Largest error of a rate, as a share of the rate.
_TRIES = 3  # A busy machine may disturb a transfer of less than a second.
# Share of a full Ethernet frame that is payload of TCP: 1448 of 1514 bytes.
_GOODPUT = 1448 / 1514


def check(network: ThrottledNetwork) -> list[float]:
  """Measures the link from every node to the next one, and prints a summary.

  The node after the last one is the first one. Returns, for each node, the
  measured rate divided by the expected one (`checked_ratio`).

  Raises:
    UsageError: If a rate is wrong by more than 3 % three times in a row, or if
      a transfer fails.
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
  """Measures the link from one node to the next, and checks its rate.

  Returns the measured payload rate divided by the payload rate that TCP should
  reach on this link. The nodes are numbered from 0.

  Raises:
    UsageError: If the rate is wrong by more than 3 % three times in a row, or
      if a transfer fails.
  """
  peer = (node + 1) % len(network.links)
  # A transfer leaves the node by its uplink, and reaches the peer by the peer's
  # downlink.
  slower = min(network.links[node].up_bps, network.links[peer].down_bps)
  expected_bps = _GOODPUT * slower
  ratio = 0.0
  for _ in range(_TRIES):
    measured_bps = transfer_bps(
      network, sender=node, receiver=peer, expected_bps=expected_bps
    )
    ratio = measured_bps / expected_bps
    if abs(ratio - 1) <= _TOLERANCE:
      return ratio
  raise UsageError(
    f"the link from node {node} to node {peer} carries {ratio:.2f} times its "
    "rate, so nothing was run: free the machine or take a lower rate"
  )


def transfer_bps(
  network: ThrottledNetwork, sender: int, receiver: int, expected_bps: float
) -> float:
  """Returns the payload rate of one transfer (bit/s), first byte to last.

  Args:
    network: Network whose links throttle.
    sender: Number of the node that sends.
    receiver: Number of the node that receives.
    expected_bps: Expected payload rate (bit/s), at which the transfer takes
      0.6 s, or longer on a slow link.

  Raises:
    UsageError: If the sender fails, e.g. because it cannot connect.
  """
  module = [sys.executable, "-m", "experiments.runtime.link_check"]
  with subprocess.Popen(
    network.command(receiver, module), stdout=subprocess.PIPE, text=True
  ) as listening:
    assert listening.stdout
    # The receiver prints a line as soon as it listens.
    listening.stdout.readline()
    num_bytes = max(4 * _CHUNK_BYTES, round(expected_bps / 8 * _TRANSFER_S))
    arguments = [network.addresses[receiver], str(num_bytes)]
    sending = subprocess.run(
      network.command(sender, [*module, *arguments]),
      stderr=subprocess.PIPE,
      text=True,
    )
    if sending.returncode:
      listening.kill()  # It would wait for ever.
      errors = sending.stderr.splitlines()
      reason = errors[-1] if errors else "unknown"
      raise UsageError(
        f"nothing passes the link from node {sender} to node {receiver}, so "
        f"nothing was run ({reason})"
      )
    return float(listening.stdout.readline())


def receive() -> None:
  """Receives one transfer, and prints its payload rate (bit/s).

  A first line is printed as soon as this process listens.
  """
  with socket.create_server(("", _PORT)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    with connection:
      connection.recv(_CHUNK_BYTES)
      start = time.perf_counter()
      # The first bytes came before the clock was started.
      num_bytes = 0
      while True:
        chunk = connection.recv(_CHUNK_BYTES)
        if not chunk:
          break
        num_bytes += len(chunk)
      print(8 * num_bytes / (time.perf_counter() - start), flush=True)


def send(address: str, num_bytes: int) -> None:
  """Sends `num_bytes` zeros to an address where a receiver already listens."""
  with socket.create_connection((address, _PORT)) as connection:
    connection.sendall(bytes(num_bytes))


if __name__ == "__main__":
  if len(sys.argv) > 1:
    send(sys.argv[1], int(sys.argv[2]))
  else:
    receive()
