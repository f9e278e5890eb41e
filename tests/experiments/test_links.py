"""Links that the kernel throttles, and what is measured and predicted there."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_jax.metrics.lines import read_rows
from dilocox_jax.metrics.recorder import Timing
from dilocox_jax.plan.operations import operation
from dilocox_jax.simulate.cluster import Link
from dilocox_jax.simulate.gloo import GLOO
from experiments.runtime import link_check
from experiments.runtime.command_line import UsageError
from experiments.runtime.throttled_links import throttled_network
from experiments.tables.runs import collective_s
from experiments.tools import link_runs
from tests import runs
from tests.experiments.programs import run

MIB = 2**20
GOODPUT = 1448 / 1514 / 8  # Bytes of payload for each bit of the line.
PATIENT_S = 600.0
SLOW = Link(20e6, 40e6, 0.0)


@pytest.fixture(scope="module", name="machine")
def machine_fixture():
  """Skips where no namespace may be made."""
  try:
    with throttled_network([SLOW] * 2):
      pass
  except UsageError as error:
    pytest.skip(str(error))


network_needed = pytest.mark.usefixtures("machine")


def is_running(pid):
  return pathlib.Path(f"/proc/{pid}").exists()


def eventually(function):
  """Calls a function until it raises no error; returns what it returns.

  What is measured in seconds may be wrong while other programs need the cores.
  """
  give_up_s = time.monotonic() + PATIENT_S
  while True:
    try:
      return function()
    except (UsageError, AssertionError):
      if time.monotonic() > give_up_s:
        raise


@network_needed
@pytest.mark.parametrize("user", ["root", "other"])
def test_links_carry_their_rates_and_nothing_stays_behind(user, monkeypatch):
  if user == "other":
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
  with throttled_network([SLOW, Link(40e6, 10e6, 0.0)]) as network:
    ratios = eventually(lambda: link_check.check(network))
    assert all(abs(ratio - 1) <= 0.03 for ratio in ratios)
    pids = list(network._pids.values())
    assert len(pids) == 3 and all(map(is_running, pids))
  assert not any(map(is_running, pids))


@network_needed
def test_a_link_with_another_rate_is_refused_and_one_that_carries_nothing(
  monkeypatch,
):
  with throttled_network([SLOW] * 2) as network:
    network.throttle(0, Link(20e6, 5e6, 0.0))  # It takes in a quarter.
    with pytest.raises(UsageError, match=r"node 1 to node 0 carries 0\.[0-2]"):
      link_check.checked_ratio(network, 1)
    monkeypatch.setattr(network, "command", lambda node, words: ["false"])
    with pytest.raises(UsageError, match="nothing passes the link from node 0"):
      link_check.check(network)


@pytest.mark.parametrize(
  ("shares", "is_right"),
  [
    ([1.0], True),
    ([0.975], True),
    ([1.025], True),
    ([0.5, 2.0, 1.0], True),
    ([0.96, 1.04, 0.96], False),
  ],
)
def test_a_link_has_three_tries_to_be_within_three_percent(
  shares, is_right, monkeypatch, capsys
):
  network: Any = SimpleNamespace(links=[Link(20e6, 30e6, 0.0)] * 2)
  left = 2 * shares

  def transfer_bps(network, sender, receiver, expected_bps):
    assert receiver == 1 - sender
    assert expected_bps == pytest.approx(20e6 * 1448 / 1514)
    return left.pop(0) * expected_bps

  monkeypatch.setattr(link_check, "transfer_bps", transfer_bps)
  if is_right:
    assert link_check.check(network) == pytest.approx(2 * shares[-1:])
    assert not left and "links: 2, measured" in capsys.readouterr().out
    return
  with pytest.raises(UsageError, match="node 0 to node 1 carries 0.96 times"):
    link_check.check(network)
  assert len(left) == len(shares)


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


def ping_s(network, sender, receiver):
  """Median of ten connections that are refused, one round trip each."""
  command = [sys.executable, "-c", _PING, network.addresses[receiver]]
  found = subprocess.run(
    network.command(sender, command), stdout=subprocess.PIPE, check=True
  )
  return statistics.median(map(float, found.stdout.split()))


@network_needed
def test_a_small_message_does_not_wait_behind_the_data_of_others():
  """In one queue it would wait up to 50 ms."""
  with throttled_network([Link(100e6, 100e6, 0.0)] * 3) as network:
    ends = (1, [_SINK]), (0, [_SOURCE, network.addresses[1]])
    started = [
      subprocess.Popen(network.command(node, [sys.executable, "-c", *words]))
      for node, words in ends
    ]

    def assert_that_one_waits():
      full_s = ping_s(network, 0, 1)
      beside_s = ping_s(network, 0, 2)
      assert full_s > 0.005 and beside_s < full_s / 2

    try:
      eventually(assert_that_one_waits)
    finally:
      for process in started:
        process.kill()
        process.wait()


@network_needed
def test_netem_delays_and_loses_in_every_queue(monkeypatch):
  """As tc-netem(8) writes it, since not every kernel has it."""
  told = []
  with throttled_network([SLOW] * 3) as network:
    monkeypatch.setattr(network, "_tc", lambda *each: told.append(each))
    network.links[0] = Link(1e7, 1e7, 0.04, 0.01)
    network.impair()
  words = "qdisc replace dev {} parent 1:{} netem limit 100000 {}loss 1.000000%"
  assert told == [
    ("10.77.0.1", [words.format("wan", q, "delay 20000us ") for q in (1, 2)]),
    ("switch", [words.format("port0", q, "") for q in (1, 2)]),
  ]


@network_needed
@pytest.mark.parametrize(("rtt_s", "loss"), [(0.04, 0.0), (0.0, 0.01)])
def test_a_kernel_without_netem_is_named(rtt_s, loss, tmp_path, monkeypatch):
  """This one may have it, so that `tc` says what it says where it lacks."""
  tc = tmp_path / "tc"
  tc.write_text(
    "#!/bin/sh\n"
    'case "$*" in *netem*) echo "Error: unknown qdisc." >&2; exit 2;; esac\n'
    f'exec {shutil.which("tc")} "$@"\n'
  )
  tc.chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
  says = "this kernel has no netem.*leave out --rtt and --loss.*unknown qdisc"
  with pytest.raises(UsageError, match=says) as error:
    with throttled_network([Link(1e7, 1e7, rtt_s, loss)] * 2):
      pass
  assert "\n" not in str(error.value)
  with throttled_network([Link(1e7, 1e7, 0.0)] * 2):
    pass


HOLDS = """
import time
from dilocox_jax.simulate.cluster import Link
from experiments.runtime.throttled_links import throttled_network
with throttled_network([Link(1e7, 1e7, 0.0)] * 2) as network:
  print(*network._pids.values(), flush=True)
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
  deadline = time.monotonic() + PATIENT_S
  while any(map(is_running, pids)) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not any(map(is_running, pids))


# Predictions.


def predicted(cluster, kind="all_reduce", transport=link_runs._PLAIN):
  collective = operation(kind, 16 * MIB)
  return collective_s(cluster, transport, collective)


def test_predictions_are_the_bytes_over_the_rate_times_what_gloo_takes():
  for count, share in ((2, 1.0), (4, 1.5)):
    cluster = link_runs.cluster_of([1e8] * count)
    assert cluster.name == f"{count} x 100 Mbit/s"
    by_hand_s = 16 * MIB * share / 1e8 / GOODPUT
    assert predicted(cluster) == pytest.approx(by_hand_s)
    for kind, _ in GLOO.factors:
      longer = predicted(cluster, kind, GLOO) / predicted(cluster, kind)
      assert longer == pytest.approx(GLOO.slowness(kind, count))
  uneven = link_runs.cluster_of([1e8, 1e9, 1e9, 1e9])
  slowest = predicted(link_runs.cluster_of([1e8] * 4))
  assert predicted(uneven) == pytest.approx(slowest, rel=0.35)


@pytest.mark.parametrize(
  "setting", link_runs.SETTINGS, ids=lambda each: each.method
)
def test_a_method_is_timed_after_what_compiles_and_predicted_by_its_plan(
  setting, tmp_path
):
  values: dict[str, Any] = {}
  for flag in link_runs.flags_of(setting, tmp_path)[1:]:
    path, _, text = flag.removeprefix("--config.").partition("=")
    section, _, field = path.rpartition(".")
    place = values.setdefault(section, {}) if section else values
    place[field] = text if not text.isdigit() else int(text)
  slow, fast = (
    link_runs.predicted_step_s(values, rate_bps, GLOO, 0.05)
    for rate_bps in (50e6, 1e12)
  )
  assert slow >= 0.05 and fast == pytest.approx(0.05, rel=0.05)
  assert slow > 0.1 or setting.method != "allreduce"
  timings = [
    Timing(20 * n, "round", 99.0 if n <= 3 else 2.0, link_bytes=105)
    for n in range(1, 8)
  ]
  rounds = [SimpleNamespace(step=20 * n, sent_bytes=100) for n in range(1, 8)]
  done: Any = SimpleNamespace(timings=timings, rounds=rounds)
  assert link_runs.measured_step(done) == pytest.approx((0.1, 1.05))


RESULTS = pathlib.Path(__file__).parents[2] / "docs/results"
MEASURED = json.loads((RESULTS / "links_processes.json").read_text())


def test_what_was_measured_among_processes_is_predicted_within_five_percent():
  """By the simulator of today; what the cores bound says nothing of links."""
  by_links = 0
  for values in MEASURED:
    row = link_runs.Row(**values)
    ((count, mbps),) = re.findall(r"^(\d) x (\d+) Mbit/s$", row.links)
    ((kind, size),) = re.findall(r"^(\w+) of (\d+) MiB$", row.what)
    seconds = collective_s(
      cluster=link_runs.cluster_of([1e6 * int(mbps)] * int(count)),
      transport=GLOO,
      collective=operation(kind, int(size) * MIB),
    )
    if not row.is_bound_by_cpu:
      by_links += 1
      assert seconds == pytest.approx(row.measured_s, rel=0.05), row
  assert by_links >= 0.8 * len(MEASURED)
  counts = {row["links"].split()[0] for row in MEASURED}
  assert counts == {"2", "4", "8"}


def test_a_row_is_the_cores_if_open_links_take_a_fifth_of_its_time():
  row = link_runs.Row("2 x 1 Mbit/s", "all_reduce of 1 MiB", 1.0, 2.0, 1.0)
  assert not row.is_bound_by_cpu
  for open_s, is_bound in ((0.39, False), (0.41, True)):
    changed = dataclasses.replace(row, open_s=open_s)
    assert changed.is_bound_by_cpu == is_bound


def imitated(cluster, collectives, folder, repeats):
  """Links of an eighth of a byte a bit that carry all processes' bytes."""
  bps = cluster.sites[0].link.up_bps
  return [(size / bps + 0.05, float(size), 0.01) for _, size in collectives]


def test_processes_are_measured_over_open_links_and_over_slow_ones(
  monkeypatch, tmp_path
):
  monkeypatch.setattr(link_runs, "_measured", imitated)
  flags = "--cases=processes", "--processes=3", f"--workdir={tmp_path}"
  done = run("tools.links", *flags)
  assert done.returncode == 0, done.stderr
  rows = json.loads((tmp_path / "links.json").read_text())
  rates_bps = link_runs.PROCESS_RATES_BPS
  assert len(rows) == 5 * len(rates_bps)
  assert [row["links"] for row in rows[::5]] == [
    f"3 x {bps / 1e6:g} Mbit/s" for bps in rates_bps
  ]
  first = rows[0]
  assert first["what"] == "all_reduce of 1 MiB"
  assert first["measured_s"] == pytest.approx(MIB / 20e6 + 0.05)
  assert first["open_s"] == pytest.approx(0.05, rel=1e-3)
  assert first["cpu_s"] == pytest.approx(0.03)
  (line,) = [
    line
    for line in done.stdout.splitlines()
    if line.startswith("| 3 x 200 Mbit/s | all_reduce of 1 MiB ")
  ]
  assert line.split(" | ")[-3:] == ["0.0500", "0.030", "the cores |"]


def test_a_calibration_has_a_factor_for_each_number_of_processes(
  monkeypatch, tmp_path
):
  monkeypatch.setattr(link_runs, "_measured", imitated)
  transport = link_runs.calibrated(tmp_path, repeats=1)
  size = 3 * MIB
  took_s = size / 60e6 + 0.05
  for count in (2, 4):
    sent = size * 2 * (count - 1) / count
    factor = took_s / (sent / 60e6 / GOODPUT)
    assert transport.slowness("all_reduce", count) == pytest.approx(factor)


# Whole programs.


@network_needed
@pytest.mark.slow
def test_links_carry_what_the_plan_counts_no_faster_than_predicted(tmp_path):
  done = run("tools.links", "--cases=quick", f"--workdir={tmp_path}")
  assert done.returncode == 0, done.stderr
  for row in json.loads((tmp_path / "links.json").read_text()):
    assert 1 <= row["bytes_ratio"] <= 1.08
    # Other tests may delay a message; nothing is faster than its link.
    assert row["predicted_s"] / row["measured_s"] <= 1.25
  transport = json.loads((tmp_path / "transport.json").read_text())
  pair = {kind: dict(by_count)[2] for kind, by_count in transport["factors"]}
  # 1: both directions at once; 2: one after the other. Which of them gloo comes
  # near changes from one hour to the next, so predictions use what is measured.
  assert 0.9 < pair["all_gather"] < 2.5


@network_needed
@pytest.mark.slow
def test_a_run_over_a_throttled_link_counts_the_bytes_on_it(tmp_path):
  launch = [sys.executable, "-m", "experiments.launch", "--link=1 Mbit/s"]
  given = [*runs.SMALL_FLAGS, f"--workdir={tmp_path}"]
  done = subprocess.run([*launch, *given], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "links: 2, measured" in done.stdout
  timings = read_rows(tmp_path / "timing.jsonl")
  counted = [row["link_bytes"] for row in timings if row["event"] == "round"]
  planned = [row["sent_bytes"] for row in runs.rows(tmp_path, "round")]
  assert sum(counted) > sum(planned)
