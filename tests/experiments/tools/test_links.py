"""Collectives and methods over real links, beside what is predicted."""

import ast
import contextlib
import dataclasses
import importlib
import json
import math
import pathlib
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_jax.config import from_mapping, to_plan
from dilocox_jax.metrics import Timing
from dilocox_jax.plan.collective import Collective
from dilocox_jax.simulate.transfer import GLOO
from experiments.runtime import command_line
from experiments.runtime.cluster_links import cluster_links
from experiments.runtime.command_line import StoppedError
from experiments.tools.real_links import (
  bandwidths,
  cases,
  collectives,
  network,
  page,
  timed_runs,
)
from experiments.tools.real_links.changing_link import (
  OPEN_BIT_PER_S,
  ChangingLink,
)
from experiments.tools.real_links.network import equal_cluster
from tests.experiments.programs import run

CONFIG = {
  "sync": {"method": "diloco", "sync_interval": 20},
  "data": {"batch_size": 2, "sequence_length": 32},
}


def run_of(walls_s) -> Any:
  timings = [
    Timing(20 * n, "round", wall_s, link_bytes=105)
    for n, wall_s in enumerate(walls_s, 1)
  ]
  rounds = [
    SimpleNamespace(step=20 * n, sent_bytes=100)
    for n in range(1, len(walls_s) + 1)
  ]
  return SimpleNamespace(timings=timings, rounds=rounds, config=CONFIG)


def test_the_link_becomes_slower_in_the_order_of_the_table():
  rates = [bandwidths.rate_of([1.0] * number) for number in range(24)]
  assert rates[:7] == [OPEN_BIT_PER_S] * 7  # Three that compile.
  assert rates[7:19] == [1e9] * 4 + [200e6] * 4 + [50e6] * 4
  assert rates[19:] == [50e6] * 5  # The run ends there.


def test_a_method_is_compared_with_the_simulator_over_each_link():
  # 20 steps of 0.05 s, and 3.4 MB a round over the link. Over an open link
  # the machine makes collectives nine times slower than their bytes.
  config: Any = from_mapping(CONFIG)
  slow = dataclasses.replace(GLOO, factors=(("all_reduce", 9.0, 9.0),))

  def walls_s(rate_bps):
    transport = slow if rate_bps == OPEN_BIT_PER_S else GLOO
    seconds = 20 * bandwidths._predicted(config, rate_bps, transport, 0.05)
    return [9.0, seconds, seconds, seconds]  # The link changes in the first.

  rates = (OPEN_BIT_PER_S, *bandwidths.RATES_BPS)
  walls = [wall_s for rate in rates for wall_s in walls_s(rate)]
  rows = bandwidths.measured(run_of([99.0] * 3 + walls), "diloco", GLOO, slow)
  assert [row.rate_bps for row in rows] == list(bandwidths.RATES_BPS)
  for row in rows:
    assert row.alone_s == pytest.approx(0.05)
    assert row.predicted_s == pytest.approx(row.measured_s)
    assert (row.sync_interval, row.tokens_per_step) == (20, 128)
    assert row.bytes_ratio == pytest.approx(1.05)
  # 28 ms over 1 Gbit/s and 0.57 s over 50 Mbit/s, behind a second of steps.
  assert rows[0].utilisation > 0.95 > 0.7 > rows[-1].utilisation > 0.6


@pytest.mark.parametrize("name, interval, changes", bandwidths.SETTINGS)
def test_every_setting_sends_so_much_at_once_that_headers_are_few(
  name, interval, changes
):
  """Gloo's own messages are about 1 kB an exchange."""
  model = importlib.import_module(f"experiments.configs.{name}").get_config()
  flags = timed_runs.flags_of(
    name,
    interval,
    1,
    pathlib.Path("run"),
    (*timed_runs.LARGER_CHANGES, *changes),
  )
  for flag in flags:
    if match := re.fullmatch(r"--config\.(\w+)\.(\w+)=(.*)", flag):
      section, field, text = match.groups()
      with contextlib.suppress(ValueError, SyntaxError):
        text = ast.literal_eval(text)
      model[section][field] = text
  traffic = to_plan.traffic(command_line.run_config(model))
  for each in traffic.exchange(traffic.method.schedule.num_fragments - 1):
    assert each.operand_bytes > 60_000


PLAIN = dataclasses.replace(GLOO, factors=())
GOODPUT = 1448 / 1514 / 8  # Bytes of payload for each bit of the line.
MIB = 2**20


def predicted(cluster, kind="all_reduce", transport=PLAIN):
  return cases.predicted_s(cluster, transport, Collective(kind, 16 * MIB))


def test_predictions_are_the_bytes_over_the_rate():
  for count, share in ((2, 1.0), (4, 1.5)):
    cluster = equal_cluster("100 Mbit/s", count)
    assert predicted(cluster) == pytest.approx(16 * MIB * share / 1e8 / GOODPUT)


def test_gloo_takes_longer_by_kind_and_number_of_processes():
  for count, place in ((2, 0), (4, 1)):
    cluster = equal_cluster("100 Mbit/s", count)
    for kind, *factors in GLOO.factors:
      payload_s = predicted(cluster, kind)
      assert predicted(cluster, kind, GLOO) == pytest.approx(
        factors[place] * payload_s
      )


def test_a_calibration_takes_each_kind_between_two_and_among_four(
  monkeypatch, tmp_path
):
  def measured(network, operands, repeats, folder):
    seconds = 1.0 if len(network.nodes) == 2 else 4.0
    return [(seconds, 100.0, 0.5)] * len(operands)

  monkeypatch.setattr(cases, "network_of", contextlib.nullcontext)
  monkeypatch.setattr(
    cases,
    "measure_collectives",
    lambda cluster, *rest: measured(cluster_links(cluster), *rest),
  )
  transport = cases.calibrated(tmp_path)
  assert [kind for kind, *_ in transport.factors] == list(collectives._MOVES)
  cluster = equal_cluster("60 Mbit/s", 4)
  for kind, pair, more in transport.factors:
    size = Collective(kind, 3 * MIB // 2)
    assert cases.predicted_s(cluster, transport, size) == pytest.approx(4.0)
    assert 0 < pair < more * 4


def test_collectives_over_an_open_link_are_measured(monkeypatch, tmp_path):
  throttled = []

  @contextlib.contextmanager
  def network(cluster):
    yield SimpleNamespace(throttle=lambda *each: throttled.append(each))

  monkeypatch.setattr(cases, "network_of", network)
  monkeypatch.setattr(
    cases,
    "measure_collectives",
    lambda _, given, *__: [(0.5, 1, 1)] * len(given),
  )
  transport = cases.calibrated_open(tmp_path)
  assert [link.up_bit_per_s for _, link in throttled] == [1e10, 1e10]
  pair = equal_cluster("10 Gbit/s", 2)
  for kind, *_ in GLOO.factors:
    whole = Collective(kind, 8 * MIB)
    assert cases.predicted_s(pair, transport, whole) == pytest.approx(0.5)


def test_a_shared_uplink_is_used_twice_by_a_bad_order_of_ranks():
  good, bad = (cases._two_sites(order) for order in ("AABB", "ABAB"))
  assert predicted(bad) == pytest.approx(2 * predicted(good))


def test_the_slowest_node_sets_the_pace():
  slow = cases._one_slow("1 Gbit/s", "100 Mbit/s")
  assert predicted(slow) == pytest.approx(
    predicted(equal_cluster("100 Mbit/s", 4)), rel=0.35
  )
  assert predicted(slow) > 5 * predicted(equal_cluster("1 Gbit/s", 4))


class Links:
  """Notes what its links became."""

  addresses = ("a", "b")

  def __init__(self):
    self.changes = []

  def throttle(self, node, link):
    self.changes.append((node, link.up_bit_per_s))


def test_a_change_that_comes_a_round_too_late_is_told(tmp_path, capsys):
  timing = tmp_path / "timing.jsonl"
  row = json.dumps({"step": 1, "event": "round", "wall_s": 1.5}) + "\n"

  class Slow(Links):
    def throttle(self, node, link):
      super().throttle(node, link)
      if timing.exists() and not node:
        with timing.open("a") as file:
          file.write(row)  # A round ends while the link changes.

  network = Slow()
  with ChangingLink(network, timing, lambda walls: 1e6 * bool(walls)):  # type: ignore
    timing.write_text(row)
    deadline = time.monotonic() + 10
    while len(network.changes) < 4 and time.monotonic() < deadline:
      time.sleep(0.01)
  assert "the link changed so late" in capsys.readouterr().err


def test_a_link_changes_when_a_round_ends_and_only_then(tmp_path):
  network, timing = Links(), tmp_path / "timing.jsonl"
  rates = [10e6, 10e6, 2e6]

  def add(event):
    with timing.open("a") as file:
      file.write(json.dumps({"step": 1, "event": event, "wall_s": 1.5}) + "\n")

  def settle(count):
    deadline = time.monotonic() + 10
    while len(network.changes) < count and time.monotonic() < deadline:
      time.sleep(0.01)

  with ChangingLink(network, timing, lambda walls: rates[len(walls)]):  # type: ignore
    for event in ("round", "checkpoint"):
      add(event)
    time.sleep(0.1)
    assert sorted(network.changes) == [(0, 10e6), (1, 10e6)]
    add("round")
    settle(4)
  assert sorted(network.changes[2:]) == [(0, 2e6), (1, 2e6)]


def test_a_change_that_fails_is_raised_at_the_end(tmp_path):
  timing = tmp_path / "timing.jsonl"

  class Broken(Links):
    def throttle(self, node, link):
      super().throttle(node, link)
      if timing.exists():
        raise OSError("tc is gone")

  network = Broken()

  def runs():
    row = json.dumps({"step": 1, "event": "round", "wall_s": 1.5})
    timing.write_text(row + "\n")
    deadline = time.monotonic() + 10
    while len(network.changes) < 3 and time.monotonic() < deadline:
      time.sleep(0.01)

  with (
    pytest.raises(OSError, match="tc is gone"),
    ChangingLink(network, timing, lambda walls: 1e6 * bool(walls)),  # type: ignore
  ):
    runs()


class Local:
  """Stands for a network; runs every command on this machine."""

  addresses = ("127.0.0.1", "127.0.0.1")

  def command(self, node, command):
    return ["env", f"NODE={node}", *command]


def test_a_process_that_fails_ends_all_and_is_an_error():
  local: Any = Local()
  network.run_together(local, "os", [[], []])  # A module that does nothing.
  with pytest.raises(StoppedError, match="process . failed with exit code"):
    network.run_together(local, "no_such_module", [[], []])
  assert network.coordinator_of(local).startswith("127.0.0.1:")


@pytest.mark.parametrize("kind", list(collectives._MOVES))
def test_each_kind_is_timed_also_by_a_single_process(kind):
  ((seconds, sent, busy),) = collectives.measure([(kind, 1 << 26)], 3)
  assert 0 < seconds < 60 and math.isnan(sent)  # It has no link to count.
  assert math.isnan(busy) or 0 <= busy <= 1  # Unknown if no tick has passed.


def test_the_middle_mean_leaves_a_quarter_out_at_each_end():
  assert collectives.middle_mean([100.0, 1.0, 3.0, 2.0, 0.0]) == 2.0
  assert collectives.middle_mean([4.0, 8.0]) == 6.0


def test_a_process_that_works_keeps_a_core_busy():
  cores, end_s = collectives.CoreUse(), time.perf_counter() + 0.2
  while time.perf_counter() < end_s:
    pass
  assert 0 < cores.busy_share() <= 1


def test_the_page_shows_every_case_and_the_transport(tmp_path):
  rows = [
    cases.Row("2 x 1 Gbit/s", "all_reduce", 2_000_000, 0.5, 0.4, 10, 10.5, 0.25)
  ]
  methods = [
    bandwidths.BandwidthRow("allreduce", 1, 5e7, 128, 0.1, 2.1, 2.0, 1.06),
    bandwidths.BandwidthRow("diloco", 20, 5e7, 128, 0.1, 0.21, 0.2, 1.05),
  ]
  page.report(rows, methods, GLOO, tmp_path)
  text = (tmp_path / "report.md").read_text()
  assert "| 0.5000 | 0.4000 | 1.250 | 1.050 | 25% |" in text
  assert "all_gather 1.500 and 1.040" in text
  line = "| diloco | 20 | 50 | 640 | 10.00 | 10.00 | 0.2100 | 0.2000 | 1.050 |"
  assert f"{line} 50.0%" in text
  first, *_, last = json.loads((tmp_path / "links.json").read_text())
  assert (first["ratio"], last["measured_s"]) == (1.25, 0.2)


def test_times_of_an_earlier_call_are_not_read_again(tmp_path):
  command_line.writable(str(tmp_path), "links")
  (tmp_path / "open").mkdir()
  (tmp_path / "open" / "run.json").touch()
  done = run("tools.links", f"--workdir={tmp_path}")
  assert done.returncode == 2 and "open holds a run" in done.one_line


@pytest.mark.usefixtures("namespaces")
def test_links_carry_what_the_plan_counts_no_faster_than_predicted(tmp_path):
  done = run("tools.links", "--cases=quick", f"--workdir={tmp_path}")
  assert done.returncode == 0, done.stderr
  rows = json.loads((tmp_path / "links.json").read_text())
  assert [row["kind"] for row in rows] == ["all_reduce", "all_gather"]
  for row in rows:
    assert 1 <= row["link_bytes"] / row["planned_bytes"] <= 1.08
    # Other tests may delay a message; nothing is faster than its link.
    assert row["ratio"] <= 1.25
  transport = json.loads((tmp_path / "transport.json").read_text())
  pair = {kind: factor for kind, factor, _ in transport["factors"]}
  # 1: both directions at once; 2: one after the other. Which of them gloo comes
  # near changes from one hour to the next, so predictions use what is measured.
  assert 0.9 < pair["all_gather"] < 2.5
  assert (
    "| 2 x 100 Mbit/s | all_gather |" in (tmp_path / "report.md").read_text()
  )
