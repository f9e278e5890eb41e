"""Tools: paired ratios, rates of steps, links beside their predictions."""

import importlib.util
import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from dilocox_jax.config import from_mapping
from dilocox_jax.metrics import Timing
from dilocox_jax.plan.collective import Collective
from dilocox_jax.plan.model.shapes import flops_per_token, parameter_count
from dilocox_jax.simulate.transfer import GLOO
from experiments.runtime import command_line
from experiments.runtime.command_line import StoppedError
from experiments.tools import (
  bench,
  bench_inner,
  bench_torch,
  link_cases,
  link_collectives,
  link_methods,
  links,
)
from tests.experiments.programs import run

HAS_TORCH = importlib.util.find_spec("torch") is not None
SMALL = {
  "data": {"batch_size": 4, "sequence_length": 8},
  "model": {"preset": "nano", "scan_unroll": 1},
  "inner": {"accumulate_steps": 2},
}
DIVIDED = {"layout": "mesh", "num_stages": 2, "num_data_shards": 2}
MIB = 2**20
GOODPUT = 1448 / 1514 / 8  # Bytes of payload for each bit of the line.


@pytest.fixture
def clock(monkeypatch):
  """A clock that only moves when a program says how long it took."""
  now = [0.0]
  monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

  def takes(*seconds):
    durations = itertools.cycle(seconds)

    def run():
      now[0] += next(durations)

    return run

  return takes


@pytest.mark.parametrize(
  ("slow", "fast", "scale", "median", "is_within"),
  [
    # The first call of each compiles; the pairs are then 4/2, 9/3 and 2/2.
    ((50.0, 4.0, 9.0, 2.0), (60.0, 2.0, 3.0, 2.0), 1.0, 2.0, True),
    ((8.0,), (2.0,), 4.0, 1.0, True),
    ((3.61,), (1.0,), 1.0, 3.61, False),
  ],
)
def test_a_ratio_is_the_median_of_paired_times(
  clock, slow, fast, scale, median, is_within
):
  ratio = bench.Ratio("made up", clock(*slow), clock(*fast), 3.6, scale)
  found = bench.measure_ratio(ratio, 3)
  assert found["median"] == pytest.approx(median)
  assert found["is_within_bound"] == is_within
  assert found["min"] <= found["median"] <= found["max"]


@pytest.mark.parametrize(
  "mesh", [{}, pytest.param(DIVIDED, marks=pytest.mark.slow)]
)
def test_rates_follow_from_the_measured_step(mesh, monkeypatch):
  monkeypatch.setitem(bench_inner.DEVICE_PEAK_FLOPS, "cpu", 1e9)
  config = from_mapping(SMALL | {"mesh": mesh})
  found = bench_inner.measure_steps(config, 3)
  devices = 8 if mesh else 1
  rate = 2 * 4 * 8 / found["step_s"]
  assert found["tokens_per_s"] == pytest.approx(rate)
  flops = rate * flops_per_token(config.model.shape, 8) / devices
  assert found["mfu"] == pytest.approx(flops / 1e9)
  parameters = parameter_count(config.model.shape)
  assert found["argument_bytes"] > 2 * 4 * parameters / devices


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCH, reason="make bench-peers installs PyTorch")
def test_pytorch_trains_the_same_model():
  # It compares losses of 60 steps itself.
  assert [ratio.baseline() for ratio in bench_torch.peer_ratios()]


# Links.


def predicted(cluster, kind="all_reduce", transport=link_cases._PLAIN):
  collective = Collective(kind, 16 * MIB)
  return link_cases.predicted_s(cluster, transport, collective)


def test_predictions_are_the_bytes_over_the_rate_times_what_gloo_takes():
  for count, share, place in ((2, 1.0, 0), (4, 1.5, 1)):
    cluster = link_cases.equal_cluster("100 Mbit/s", count)
    by_hand_s = 16 * MIB * share / 1e8 / GOODPUT
    assert predicted(cluster) == pytest.approx(by_hand_s)
    for kind, *factors in GLOO.factors:
      longer = predicted(cluster, kind, GLOO) / predicted(cluster, kind)
      assert longer == pytest.approx(factors[place])


def test_a_bad_order_of_ranks_and_a_slow_node_cost_what_they_should():
  cases = {cluster.name: cluster for cluster, _ in link_cases.all_cases()}
  good = predicted(cases["2 sites, ranks A A B B"])
  bad = predicted(cases["2 sites, ranks A B A B"])
  assert bad == pytest.approx(2 * good)
  slow = predicted(cases["3 x 1 Gbit/s, 1 x 100 Mbit/s"])
  assert slow == pytest.approx(predicted(cases["4 x 100 Mbit/s"]), rel=0.35)
  assert slow > 5 * predicted(cases["4 x 1 Gbit/s"])


def test_a_calibration_is_measured_over_predicted(monkeypatch, tmp_path):
  def rows(cases, transport, *_):
    for cluster, collectives in cases:
      for each in collectives:
        plain_s = link_cases.predicted_s(cluster, transport, each)
        measured_s = plain_s * (1 + cluster.num_replicas)
        name = cluster.name, each.kind, each.operand_bytes
        yield link_cases.Row(*name, plain_s, measured_s, 1, 1.0)

  monkeypatch.setattr(link_cases, "run_cases", rows)
  factors = link_cases.calibrated(tmp_path).factors
  assert [kind for kind, *_ in factors] == list(link_collectives.MOVES)
  for _, pair, more in factors:
    assert (pair, more) == (pytest.approx(3.0), pytest.approx(5.0))


@pytest.mark.parametrize("name, interval, changes", link_methods.SETTINGS)
def test_a_method_is_timed_after_what_compiles_and_predicted_by_its_plan(
  name, interval, changes, tmp_path
):
  flags = link_methods.flags_of(name, interval, changes, tmp_path)
  values: dict[str, Any] = {"sync": {"method": name}}
  for flag in flags:
    path, _, text = flag.removeprefix("--config.").partition("=")
    if flag.startswith("--config."):
      section = values
      for part in path.split(".")[:-1]:
        section = section.setdefault(part, {})
      section[path.split(".")[-1]] = text if not text.isdigit() else int(text)
  slow, fast = (
    link_methods.predicted(values, rate_bps, GLOO, 0.05)
    for rate_bps in (50e6, 1e12)
  )
  assert slow >= 0.05 and fast == pytest.approx(0.05, rel=0.05)
  assert slow > 0.1 or name != "allreduce"
  timings = [
    Timing(20 * n, "round", 99.0 if n <= 3 else 2.0, link_bytes=105)
    for n in range(1, 8)
  ]
  rounds = [SimpleNamespace(step=20 * n, sent_bytes=100) for n in range(1, 8)]
  done: Any = SimpleNamespace(timings=timings, rounds=rounds)
  assert link_methods.measured(done) == pytest.approx((0.1, 1.05))


class Local:
  """Stands for a network; runs every command on this machine."""

  addresses = ("127.0.0.1", "127.0.0.1")

  def command(self, node, command):
    return ["env", f"NODE={node}", *command]


def test_a_process_that_fails_ends_all_and_is_an_error():
  local: Any = Local()
  with pytest.raises(StoppedError, match="failed with exit code"):
    link_cases.run_together(local, "no_such_module", [])


@pytest.mark.parametrize("kind", link_collectives.MOVES)
def test_each_kind_is_timed_also_by_a_single_process(kind):
  ((seconds, _),) = link_collectives.measure([(kind, 1 << 20)], 3)
  assert 0 < seconds < 60


def test_the_middle_mean_leaves_a_quarter_out_at_each_end():
  assert link_collectives.middle_mean([100.0, 1.0, 3.0, 2.0, 0.0]) == 2.0
  assert link_collectives.middle_mean([4.0, 8.0]) == 6.0


def test_the_page_shows_every_case(tmp_path):
  size = 2_000_000
  rows = [link_cases.Row("2 x 1 Gbit/s", "permute", size, 0.5, 0.4, 10, 10.5)]
  methods = [
    link_methods.MethodRow("allreduce", 5e7, 2.1, 2.0, 1.06),
    link_methods.MethodRow("diloco", 5e7, 0.21, 0.2, 1.05),
  ]
  text = "\n".join(links.report(rows, methods, tmp_path))
  assert "| 0.5000 | 0.4000 | 1.250 | 1.050 |" in text
  assert "| diloco | 10.00 | 10.00 | 0.2100 | 0.2000 | 1.050 | 1.050 |" in text
  assert len(json.loads((tmp_path / "links.json").read_text())) == 3


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
  for row in json.loads((tmp_path / "links.json").read_text()):
    assert 1 <= row["link_bytes"] / row["planned_bytes"] <= 1.08
    # Other tests may delay a message; nothing is faster than its link.
    assert row["predicted_s"] / row["measured_s"] <= 1.25
  transport = json.loads((tmp_path / "transport.json").read_text())
  pair = {kind: factor for kind, factor, _ in transport["factors"]}
  # 1: both directions at once; 2: one after the other. Which of them gloo comes
  # near changes from one hour to the next, so predictions use what is measured.
  assert 0.9 < pair["all_gather"] < 2.5
