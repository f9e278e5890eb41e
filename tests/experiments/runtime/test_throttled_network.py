import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments.runtime import link_check, throttled_network
from experiments.runtime.command_line import UsageError
from experiments.runtime.throttled_network import Links, NodeLink, Uplink

SLOW = NodeLink(up_bit_per_s=20e6, down_bit_per_s=40e6)
TWO = Links([SLOW] * 2)
# A process that makes a network, says who holds it, and waits.
HOLDS = """
import time
from experiments.runtime.throttled_network import Links, NodeLink
from experiments.runtime.throttled_network import throttled_network
with throttled_network(Links([NodeLink(1e7, 1e7)] * 2)) as network:
  print(*network._root.pids.values(), flush=True)
  time.sleep(600)
"""

pytestmark = pytest.mark.usefixtures("namespaces")


def is_running(pid):
  return pathlib.Path(f"/proc/{pid}").exists()


def holders(network):
  return list(network._root.pids.values())


@pytest.mark.parametrize("user", ["root", "other"])
def test_links_carry_their_rates_and_nothing_stays_behind(user, monkeypatch):
  if user == "other":
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
  links = Links([SLOW, NodeLink(40e6, 10e6)])
  with throttled_network.throttled_network(links) as network:
    ratios = link_check.check(network, links)
    assert all(abs(ratio - 1) <= 0.03 for ratio in ratios)
    # Node 1 sent 0.6 s at 40 Mbit/s, and acknowledged what node 0 sent.
    payload = 0.6 * 40e6 / 8 * link_check.GOODPUT
    assert 1 < network.sent_bytes(1) / payload < 1.2
    pids = holders(network)
    assert len(pids) == 3 and all(map(is_running, pids))
  assert not any(map(is_running, pids))


def test_a_link_that_is_not_what_it_should_be_is_refused():
  with throttled_network.throttled_network(TWO) as network:
    network.throttle(0, NodeLink(10e6, 40e6))
    with pytest.raises(
      UsageError, match=r"from node 0 to node 1 carries 0\.(4\d|50) "
    ):
      link_check.check(network, TWO)


def test_the_nodes_of_a_site_share_its_uplink_and_not_their_own_network():
  shared = Uplink((0, 1), NodeLink(up_bit_per_s=20e6, down_bit_per_s=40e6))
  links = Links([None, None, NodeLink(80e6, 10e6)], [shared])
  assert links.between(0, 1) == math.inf
  assert links.between(0, 2) == links.between(1, 2) == 10e6
  assert links.between(2, 1) == 40e6
  with throttled_network.throttled_network(links) as network:
    # Node 1 sends to node 2, and node 2 to node 0.
    ratios = link_check.check(network, links)
    assert len(ratios) == 2
    assert all(abs(ratio - 1) <= 0.03 for ratio in ratios)
    before = [network.sent_bytes(node) for node in range(3)]
    inside = link_check._transfer(network, 0, 1, 200e6)
    assert inside > 80e6  # Bits a second; nothing throttles it.
    assert network.sent_bytes(0) - before[0] > 0.6 * 200e6 / 8


def test_delay_is_made_by_the_kernel_or_refused_in_one_line():
  links = Links([NodeLink(20e6, 20e6, rtt_s=0.04)] * 2)
  with throttled_network.throttled_network(links) as network:
    try:
      network.impair(links)
    except UsageError as error:
      assert "cannot delay or lose packets" in str(error)
      pytest.skip(str(error))
    ping = "import socket, sys, time; t = time.perf_counter(); "
    ping += "s = socket.socket(); s.connect_ex((sys.argv[1], 1)); "
    ping += "print(time.perf_counter() - t)"
    command = [sys.executable, "-c", ping, network.addresses[1]]
    found = subprocess.run(
      network.command(0, command), stdout=subprocess.PIPE, check=True
    )
    assert 0.04 <= float(found.stdout) < 0.06


def test_a_killed_launcher_leaves_no_network_behind():
  process = subprocess.Popen(
    [sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True
  )
  with process:
    assert process.stdout
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3 and all(map(is_running, pids))
    process.send_signal(signal.SIGKILL)
  deadline = time.monotonic() + 10
  while any(map(is_running, pids)) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not any(map(is_running, pids))


def test_a_program_that_is_missing_is_named(monkeypatch):
  monkeypatch.setattr(throttled_network.shutil, "which", lambda tool: None)
  with (
    pytest.raises(UsageError, match="need the program ip, which is not"),
    throttled_network.throttled_network(TWO),
  ):
    pass
