import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

import pytest

from experiments.runtime import link_check, namespaces, throttled_network
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


PING = """
import socket, sys, time
for _ in range(10):
  start = time.perf_counter()
  socket.socket().connect_ex((sys.argv[1], 1))
  print(time.perf_counter() - start)
"""


def pings(network, sender, receiver):
  """Seconds of ten connections that are refused, one round trip each."""
  command = [sys.executable, "-c", PING, network.addresses[receiver]]
  found = subprocess.run(
    network.command(sender, command), stdout=subprocess.PIPE, check=True
  )
  return [float(line) for line in found.stdout.split()]


@pytest.mark.parametrize(
  "user", ["root", pytest.param("other", marks=pytest.mark.slow)]
)
def test_packets_are_delayed_with_or_without_the_kernels_netem(
  user, monkeypatch
):
  if user == "other":
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
  far, near = NodeLink(20e6, 20e6, rtt_s=0.06), NodeLink(20e6, 20e6, 0.02)
  links = Links([far, near, NodeLink(20e6, 20e6)])
  with throttled_network.throttled_network(links) as network:
    assert all(abs(r - 1) <= 0.03 for r in link_check.check(network, links))
    assert min(pings(network, 0, 1)) < 0.02  # Rates are checked first.
    network.impair(links)
    for pair, rtt_s in (((0, 1), 0.04), ((1, 0), 0.04), ((2, 1), 0.01)):
      shortest = min(pings(network, *pair))
      assert rtt_s <= shortest < rtt_s + 0.01
    pids = [*holders(network), *(c.pid for c in carriers(network))]
  assert not any(map(is_running, pids))


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


def test_a_full_link_goes_on_when_it_becomes_slower():
  ends = [sys.executable, "-c", _SINK], [sys.executable, "-c", _SOURCE]
  with throttled_network.throttled_network(TWO) as network:
    started = []
    for rate in (10e9, 100e6):
      for node in range(2):
        network.throttle(node, NodeLink(rate, rate))
      if not started:
        started += [
          subprocess.Popen(network.command(1, ends[0])),
          subprocess.Popen(
            network.command(0, [*ends[1], network.addresses[1]])
          ),
        ]
      time.sleep(1.0)
      before = network.sent_bytes(0)
      time.sleep(0.5)
      passed = network.sent_bytes(0) - before
      assert 0.02 < passed / (rate / 8 * 0.5) < 1.2, rate
    for process in started:
      process.kill()
      process.wait()


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_small_message_does_not_wait_behind_the_data_of_others(is_shared):
  """In one queue it would wait up to 50 ms."""
  own = NodeLink(100e6, 100e6)
  shared = [Uplink((0, 1), own)]
  links = Links([own] * 4)
  if is_shared:
    links = Links([None, None, own, own], shared)
  sender = 1 if is_shared else 0  # The node that fills the link of node 0.
  with throttled_network.throttled_network(links) as network:
    ends = (2, [_SINK]), (sender, [_SOURCE, network.addresses[2]])
    started = [
      subprocess.Popen(
        network.command(node, [sys.executable, "-c", *arguments])
      )
      for node, arguments in ends
    ]
    time.sleep(1.5)
    full = statistics.median(pings(network, sender, 2))
    beside = statistics.median(pings(network, 0, 3))
    for process in started:
      process.kill()
      process.wait()
  assert full > 0.005 and beside < full / 2


def test_a_flow_that_begins_has_no_more_than_its_share():
  """Each gets half of the link at once, whoever rested before."""
  links = Links([NodeLink(20e6, 20e6)] * 3)
  with throttled_network.throttled_network(links) as network:
    started = [
      subprocess.Popen(network.command(node, [sys.executable, "-c", _SINK]))
      for node in (1, 2)
    ]
    for receiver in (1, 2):
      source = [sys.executable, "-c", _SOURCE, network.addresses[receiver]]
      started.append(subprocess.Popen(network.command(0, source)))
      while received_bytes(network, receiver) < 30_000:
        time.sleep(0.01)
      time.sleep(1.0 if receiver == 1 else 0.0)
    before = [received_bytes(network, node) for node in (1, 2)]
    time.sleep(0.3)
    after = [received_bytes(network, node) for node in (1, 2)]
    for process in started:
      process.kill()
      process.wait()
  old, new = (b - a for a, b in zip(before, after, strict=True))
  assert 0.3 < new / (old + new) < 0.7


def test_a_queue_holds_some_frames_however_slow_its_link_is():
  slow = Links([NodeLink(150e3, 150e3)] * 3)  # Bits a second.
  with throttled_network.throttled_network(slow) as network:
    module = [sys.executable, "-m", "experiments.runtime.link_check"]
    listening = subprocess.Popen(
      network.command(1, [*module, "receive", "0"]),
      stdout=subprocess.PIPE,
      text=True,
    )
    with listening:
      assert listening.stdout
      port = listening.stdout.readline().strip()
      sent = [*module, "send", network.addresses[1], port, "30000"]
      subprocess.run(network.command(0, sent), check=True, timeout=60)
      assert float(listening.stdout.readline()) < 200e3


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


def test_queues_become_shorter_with_a_slower_link():
  with throttled_network.throttled_network(Links([SLOW] * 3)) as network:
    network.throttle(0, NodeLink(8e6, 16e6))
    shown = subprocess.run(
      network.command(0, "tc qdisc show dev wan".split()),
      capture_output=True,
      text=True,
      check=True,
    ).stdout
  assert shown.count("qdisc bfifo") == shown.count("limit 50000b") == 2


def carriers(network):
  return network._root.carriers.values()


def test_packets_are_lost_with_or_without_the_kernels_netem():
  links = Links([NodeLink(1e9, 1e9, loss=0.3), NodeLink(1e9, 1e9)])
  # Packets come slowly: a carrier without a core of its own drops a burst.
  count = "import socket, sys, time; s = socket.socket(type=socket.SOCK_DGRAM)"
  count += "; to = sys.argv[1], 9; [(s.sendto(b'x', to), time.sleep(1e-4)) "
  count += "for _ in range(2000)]"
  with throttled_network.throttled_network(links) as network:
    network.impair(links)
    command = [sys.executable, "-c", count, network.addresses[1]]
    for _ in range(2):  # The first packets wait for an address.
      before = received(network, 1)
      subprocess.run(network.command(0, command), check=True)
      time.sleep(0.2)
    share = (received(network, 1) - before) / 2000
  assert 0.65 < share < 0.75


def counted(network, node):
  """Bytes and packets that a node has received."""
  table = pathlib.Path(f"/proc/{holders(network)[1 + node]}/net/dev")
  (line,) = [row for row in table.read_text().splitlines() if "wan:" in row]
  return [int(word) for word in line.partition(":")[2].split()[:2]]


def received_bytes(network, node):
  return counted(network, node)[0]


def received(network, node):
  return counted(network, node)[1]


def test_netem_is_told_delay_and_loss_as_its_manual_says():
  # tc-netem(8): limit PACKETS, delay TIME, loss random PERCENT; "random" is the
  # default.
  assert throttled_network._netem(0.02, 0.001) == (
    "netem limit 100000 delay 20000us loss 0.100000%"
  )
  assert throttled_network._netem(0.0, 1e-6).endswith(" loss 0.000100%")


@pytest.mark.parametrize("nodes, queues", [(2, ["1:1"]), (3, ["2:1", "2:2"])])
def test_a_kernel_with_netem_gets_it_in_every_queue(nodes, queues, monkeypatch):
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


def test_a_machine_without_both_ways_to_delay_says_so(monkeypatch):
  monkeypatch.setattr(namespaces.Namespaces, "has_netem", False)
  monkeypatch.setattr(namespaces, "_CARRIER", "experiments.no_such_module")
  links = Links([NodeLink(1e7, 1e7, 0.04)] * 2)
  with (
    pytest.raises(UsageError, match="lacks netem, and /dev/net/tun does not"),
    throttled_network.throttled_network(links),
  ):
    pass


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
