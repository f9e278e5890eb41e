"""Networks of namespaces whose links the kernel throttles."""

import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

import pytest

from dilocox_jax.simulate.cluster_file import cluster_from_mapping
from experiments.runtime import link_check, throttled_network
from experiments.runtime.cluster_links import cluster_links
from experiments.runtime.command_line import UsageError
from experiments.runtime.namespaces import Namespaces
from experiments.runtime.throttled_network import Links, NodeLink, Uplink

SITE = {"up": "1 Gbit/s", "down": "2 Gbit/s", "rtt": "40 ms", "loss": "1 %"}
LINK = NodeLink(1e9, 2e9, 0.04, 0.01)
SLOW = NodeLink(up_bit_per_s=20e6, down_bit_per_s=40e6)
TWO = Links([SLOW] * 2)
network_needed = pytest.mark.usefixtures("namespaces")


def links(*sites, **rest):
  values = {"every_site": SITE, "sites": list(sites), **rest}
  return cluster_links(cluster_from_mapping(values))


def test_a_replica_has_its_own_link_or_shares_the_uplink_of_its_site():
  slow = links({"name": "a"}, {"name": "b", "up": "10 Mbit/s"})
  assert slow == Links([LINK, LINK._replace(up_bit_per_s=1e7)], [])
  sites = {"name": "a"}, {"name": "b"}
  found = links(*sites, placement=["a", "b", "a", "b"])
  assert found.nodes == [None] * 4
  assert found.uplinks == [Uplink((0, 2), LINK), Uplink((1, 3), LINK)]
  own = links({"name": "a", "shared": False}, placement=["a", "a"])
  assert own == Links([LINK, LINK], [])


PAIR = {"sites": ["a", "b"], "rate": "1 Gbit/s", "rtt": "1 ms"}


@pytest.mark.parametrize(
  "site, rest, word",
  [
    ({}, {"pairs": [PAIR]}, "pairs"),
    ({"efficiency": "50 %"}, {}, "'b' states 'efficiency'"),
    ({"up": "inf bit/s"}, {}, "'b' has no limit"),
  ],
)
def test_what_links_cannot_have_is_refused(site, rest, word):
  with pytest.raises(UsageError, match=word):
    links({"name": "a"}, {"name": "b", **site}, **rest)


def is_running(pid):
  return pathlib.Path(f"/proc/{pid}").exists()


@network_needed
@pytest.mark.parametrize("user", ["root", "other"])
def test_links_carry_their_rates_and_nothing_stays_behind(user, monkeypatch):
  if user == "other":
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
  given = Links([SLOW, NodeLink(40e6, 10e6)])
  with throttled_network.throttled_network(given) as network:
    ratios = link_check.check(network, given)
    assert all(abs(ratio - 1) <= 0.03 for ratio in ratios)
    before = network.sent_bytes(1)
    link_check._transfer(network, 1, 0, 20e6)
    # It sent 0.6 s at 20 Mbit/s of payload, and the headers of it.
    assert 1 < (network.sent_bytes(1) - before) / (0.6 * 20e6 / 8) < 1.2
    pids = list(network._root.pids.values())
    assert len(pids) == 3 and all(map(is_running, pids))
    network.throttle(0, NodeLink(10e6, 40e6))
    with pytest.raises(UsageError, match=r"node 0 to node 1 carries 0\.(4|50)"):
      link_check.check(network, TWO)
  assert not any(map(is_running, pids))


@network_needed
def test_the_nodes_of_a_site_share_its_uplink_and_not_their_own_network():
  given = Links([None, None, NodeLink(80e6, 10e6)], [Uplink((0, 1), SLOW)])
  assert given.between(0, 1) == math.inf
  assert given.between(0, 2) == given.between(1, 2) == 10e6
  assert given.between(2, 1) == 40e6
  with throttled_network.throttled_network(given) as network:
    # Node 1 sends to node 2, and node 2 to node 0.
    ratios = link_check.check(network, given)
    assert len(ratios) == 2
    assert all(abs(ratio - 1) <= 0.03 for ratio in ratios)
    inside = link_check._transfer(network, 0, 1, 200e6)
    assert inside > 80e6  # Bits a second; nothing throttles it.


_SINK = """
import socket, sys
connection, _ = socket.create_server(("", 9999)).accept()
while connection.recv(1 << 20):
  pass
"""
_SOURCE = """
import socket, sys, time
for _ in range(100):
  try:
    connection = socket.create_connection((sys.argv[1], 9999))
    break
  except OSError:
    time.sleep(0.05)
while True:
  connection.send(bytes(1 << 20))
"""
_PING = """
import socket, sys, time
for _ in range(10):
  start = time.perf_counter()
  socket.socket().connect_ex((sys.argv[1], 1))
  print(time.perf_counter() - start)
"""


def fill(network, sender, receiver):
  """Starts a flow; returns its two processes."""
  ends = (receiver, [_SINK]), (sender, [_SOURCE, network.addresses[receiver]])
  return [
    subprocess.Popen(network.command(node, [sys.executable, "-c", *words]))
    for node, words in ends
  ]


def ping_s(network, sender, receiver):
  """Median of ten connections that are refused, one round trip each."""
  command = [sys.executable, "-c", _PING, network.addresses[receiver]]
  found = subprocess.run(
    network.command(sender, command), stdout=subprocess.PIPE, check=True
  )
  return statistics.median(map(float, found.stdout.split()))


@network_needed
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_small_message_does_not_wait_behind_the_data_of_others(is_shared):
  """In one queue it would wait up to 50 ms."""
  own = NodeLink(100e6, 100e6)
  given = Links([own] * 4)
  if is_shared:
    given = Links([None, None, own, own], [Uplink((0, 1), own)])
  sender = 1 if is_shared else 0  # The node that fills the link of node 0.
  with throttled_network.throttled_network(given) as network:
    started = fill(network, sender, 2)
    time.sleep(1.5)
    full, beside = ping_s(network, sender, 2), ping_s(network, 0, 3)
    for process in started:
      process.kill()
      process.wait()
  assert full > 0.005 and beside < full / 2


@network_needed
def test_a_full_link_goes_on_when_it_becomes_slower():
  with throttled_network.throttled_network(TWO) as network:
    started = []
    for rate in (10e9, 100e6):
      for node in range(2):
        network.throttle(node, NodeLink(rate, rate))
      started = started or fill(network, 0, 1)
      time.sleep(1.0)
      before = network.sent_bytes(0)
      time.sleep(0.5)
      passed = network.sent_bytes(0) - before
      assert 0.02 < passed / (rate / 8 * 0.5) < 1.2, rate
    for process in started:
      process.kill()
      process.wait()


@network_needed
def test_a_transfer_that_fails_is_one_line(monkeypatch):
  with throttled_network.throttled_network(TWO) as network:
    command = network.command
    monkeypatch.setattr(
      network,
      "command",
      lambda node, words: command(node, words) if node else ["false"],
    )
    with pytest.raises(UsageError, match="nothing passes the link from node 0"):
      link_check.check(network, TWO)


@network_needed
@pytest.mark.parametrize("nodes, queues", [(2, ["1:1"]), (3, ["2:1", "2:2"])])
def test_netem_delays_and_loses_in_every_queue(nodes, queues, monkeypatch):
  """As tc-netem(8) writes it, since not every kernel has it."""
  told = []
  with throttled_network.throttled_network(Links([SLOW] * nodes)) as network:
    monkeypatch.setattr(network._root, "tc", lambda *each: told.append(each))
    network.impair(
      Links([NodeLink(1e7, 1e7, 0.04, 0.01), *[SLOW] * nodes][:nodes])
    )
    below = "qdisc replace dev {} parent {} netem limit 100000 {}loss 1.000000%"
    assert told == [
      ("10.77.0.1", [below.format("wan", q, "delay 20000us ") for q in queues]),
      ("switch", [below.format("port0", q, "") for q in queues]),
    ]
    told.clear()
    network.throttle(0, SLOW)  # Another rate; the delay stays.
    network.throttle(1, SLOW)
  limits = [sum("bfifo" in line for line in lines) for _, lines in told]
  assert limits == [0, 0] + 2 * [len(queues) if nodes > 2 else 0]


@network_needed
def test_a_kernel_without_netem_and_a_machine_without_tools_say_so(monkeypatch):
  monkeypatch.setattr(Namespaces, "has_netem", False)
  far = Links([NodeLink(1e7, 1e7, 0.04)] * 2)
  for word, given in (("netem", far), ("the program ip", TWO)):
    with pytest.raises(UsageError, match=word):
      with throttled_network.throttled_network(given):
        pass
    monkeypatch.setattr(throttled_network.shutil, "which", lambda tool: None)


HOLDS = """
import time
from experiments.runtime.throttled_network import Links, NodeLink
from experiments.runtime.throttled_network import throttled_network
with throttled_network(Links([NodeLink(1e7, 1e7)] * 2)) as network:
  print(*network._root.pids.values(), flush=True)
  time.sleep(600)
"""


@network_needed
def test_a_killed_launcher_leaves_no_network_behind():
  command = [sys.executable, "-c", HOLDS]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3 and all(map(is_running, pids))
    process.send_signal(signal.SIGKILL)
  deadline = time.monotonic() + 10
  while any(map(is_running, pids)) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not any(map(is_running, pids))
