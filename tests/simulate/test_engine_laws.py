"""What holds for every graph, and closed forms that some graphs have."""

import itertools
import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.simulate.engine import run_graph
from dilocox_jax.simulate.fair import max_min_rates
from dilocox_jax.simulate.graph import Graph, LinkRate
from tests.simulate.graphs import alone, drawn, ports, ring, sends

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Rounding over the some dozen changes of rate that a flow sees.
ROUNDING = 1e-12

DRAWN = st.integers(0, 10_000)


def test_a_link_without_end_leaves_only_compute():
  graph, links, _ = drawn(7, num=200)
  free = {name: LinkRate(math.inf) for name in links}
  without = Graph()
  for number, place in enumerate(graph.places):
    after = graph.predecessors(number)
    if isinstance(place, str):
      without.task("step", place, graph.amounts[number], after)
    else:
      limit = graph.limits_bytes_per_s[number]
      delay_s = graph.amounts[number] / limit + graph.latencies_s[number]
      without.task("delay", f"delay{number}", delay_s, after)
  expected = run_graph(without, {}).end_s
  np.testing.assert_allclose(
    run_graph(graph, free).end_s, expected, rtol=ROUNDING
  )


@pytest.mark.parametrize("discipline", ["fair", "fifo"])
@pytest.mark.parametrize("num", range(2, 9))
def test_a_ring_takes_what_its_closed_form_says(num, discipline):
  size_bytes, capacity, latency_s = 16e6, 119.55e6, 0.04
  timeline = run_graph(
    ring(num, size_bytes, latency_s), ports(num, capacity, discipline)
  )
  rounds = 2 * (num - 1)
  expected_s = rounds * (size_bytes / num / capacity + latency_s)
  assert timeline.makespan_s == pytest.approx(expected_s, rel=ROUNDING)


def rates_at_changes(timeline, num):
  """Spans between changes, and every flow's rate then."""
  changes = timeline.rates
  rates, before_s = np.zeros(num), 0.0
  for time_s, number, rate in zip(
    changes.time_s, changes.number, changes.bytes_per_s, strict=True
  ):
    if time_s > before_s:
      yield before_s, time_s, rates
    rates[number], before_s = rate, time_s


@given(DRAWN, st.sampled_from(["fair", "fifo"]))
def test_bytes_are_neither_lost_nor_made(seed, discipline):
  graph, links, outages = drawn(seed, discipline)
  timeline = run_graph(graph, links, outages, record_rates=True)
  carried = np.zeros(len(graph))
  for start_s, stop_s, rates in rates_at_changes(timeline, len(graph)):
    carried += rates * (stop_s - start_s)
  sizes = [
    0.0 if isinstance(place, str) else amount
    for place, amount in zip(graph.places, graph.amounts, strict=True)
  ]
  np.testing.assert_allclose(carried, sizes, atol=1e-9)
  for name in links:
    crossing = [name in place for place in graph.places]
    expected = carried[crossing].sum()
    assert timeline.link_bytes[name] == pytest.approx(expected, abs=1e-9)


@given(DRAWN, st.sampled_from(["fair", "fifo"]))
def test_no_link_is_ever_above_its_capacity(seed, discipline):
  graph, links, outages = drawn(seed, discipline)
  timeline = run_graph(graph, links, outages, record_rates=True)
  places = graph.places
  crosses = {name: np.array([name in p for p in places]) for name in links}
  for start_s, stop_s, rates in rates_at_changes(timeline, len(graph)):
    middle_s = (start_s + stop_s) / 2
    down = {o.link for o in outages if o.start_s < middle_s < o.stop_s}
    for name, link in links.items():
      capacity = 0 if name in down else link.capacity_bytes_per_s
      assert rates[crosses[name]].sum() <= capacity * (1 + ROUNDING)


def stepped(graph, links):
  """The oracle: all rates anew at each change, flows only; ends."""
  names = list(links)
  capacities = [links[name].capacity_bytes_per_s for name in names]
  num, now_s = len(graph), 0.0
  left = np.array(graph.amounts)
  sent_s, end_s = np.full(num, math.inf), np.full(num, math.inf)
  while np.isinf(end_s).any():
    ready = [
      max([end_s[p] for p in graph.predecessors(number)], default=0.0)
      for number in range(num)
    ]
    active = [
      n for n in range(num) if ready[n] <= now_s and math.isinf(sent_s[n])
    ]
    routes = [[names.index(x) for x in graph.places[n]] for n in active]
    ceilings = [graph.limits_bytes_per_s[n] for n in active]
    rates = np.array(max_min_rates(routes, ceilings, capacities))
    then = [now_s + left[n] / r for n, r in zip(active, rates, strict=True)]
    then += [time_s for time_s in ready if now_s < time_s < math.inf]
    next_s = min(then)
    left[active] -= rates * (next_s - now_s)
    now_s = next_s
    for number in active:
      if left[number] < 1e-12:
        sent_s[number] = now_s
        end_s[number] = now_s + graph.latencies_s[number]
  return end_s


@given(DRAWN)
def test_flows_end_when_solving_everything_at_each_change_says(seed):
  whole, links, _ = drawn(seed, num=25)
  graph = Graph()
  numbers = {}
  for number, place in enumerate(whole.places):
    if not isinstance(place, str):
      after = [numbers[p] for p in whole.predecessors(number) if p in numbers]
      numbers[number] = graph.flow(
        "send",
        place,
        whole.amounts[number] + 0.5,
        after,
        whole.latencies_s[number],
        whole.limits_bytes_per_s[number],
      )
  end_s = run_graph(graph, links).end_s
  np.testing.assert_allclose(end_s, stepped(graph, links), rtol=1e-10)


def places_and_time(graph, links, number):
  """What it needs for itself, and for how long."""
  place, amount = graph.places[number], graph.amounts[number]
  if isinstance(place, str):
    return (place,), amount
  rates = [links[name].capacity_bytes_per_s for name in place]
  limit = graph.limits_bytes_per_s[number]
  return place if amount else (), amount / min([*rates, limit])


@given(DRAWN)
def test_on_fifo_links_a_flow_starts_once_those_before_it_are_through(seed):
  graph, links, _ = drawn(seed, "fifo")
  timeline = run_graph(graph, links)
  order = sorted(range(len(graph)), key=lambda n: (timeline.ready_s[n], n))
  free_s = {}
  for number in order:
    ready_s = max([0.0, *timeline.end_s[graph.predecessors(number)]])
    places, duration_s = places_and_time(graph, links, number)
    start_s = max([ready_s, *(free_s.get(name, 0.0) for name in places)])
    sent_s = start_s + duration_s
    assert timeline.ready_s[number] == ready_s
    assert timeline.start_s[number] == start_s
    assert timeline.sent_s[number] == sent_s
    assert timeline.end_s[number] == sent_s + graph.latencies_s[number]
    free_s |= dict.fromkeys(places, sent_s)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e18])
def test_sizes_of_any_magnitude_are_exact(scale):
  sizes = np.random.default_rng(0).uniform(0.1, 1, 32) * scale
  timeline = run_graph(sends(*sizes.tolist()), alone(125e6))
  # Sorted, each flow adds what those still under way send together.
  ascending = np.sort(sizes)
  steps = np.diff(ascending, prepend=0) * np.arange(32, 0, -1)
  expected_s = np.cumsum(steps) / 125e6
  np.testing.assert_allclose(np.sort(timeline.end_s), expected_s, rtol=ROUNDING)


def test_a_flow_is_exact_beside_one_much_larger():
  timeline = run_graph(sends(1e-6, 1e15), alone(2.0))
  np.testing.assert_allclose(timeline.end_s, [1e-6, 5e14], rtol=ROUNDING)


@pytest.mark.parametrize("num", range(2, 10))
def test_flows_that_should_end_together_do(num):
  graph = Graph()
  for pair in itertools.combinations(range(num), 2):
    graph.flow("send", tuple(f"up{site}" for site in pair), 0.1)
  end_s = run_graph(graph, ports(num, 0.7)).end_s
  assert set(end_s) == {end_s[0]}
  assert end_s[0] == pytest.approx(0.1 * (num - 1) / 0.7, rel=ROUNDING)


@given(DRAWN, st.floats(1.0, 50.0))
def test_flows_alone_gain_what_all_links_gain(seed, factor):
  whole, links, _ = drawn(seed)
  graph = Graph()
  for place, amount in zip(whole.places, whole.amounts, strict=True):
    if not isinstance(place, str):
      last = len(graph) - 1
      graph.flow("send", place, amount, (last // 2,) if last > 0 else ())
  slow_s = run_graph(graph, links).end_s
  faster = {
    name: LinkRate(link.capacity_bytes_per_s * factor)
    for name, link in links.items()
  }
  fast_s = run_graph(graph, faster).end_s
  np.testing.assert_allclose(fast_s * factor, slow_s, rtol=ROUNDING)


def digest():
  """All bits of a few outcomes."""
  outcomes = []
  for seed in range(20):
    discipline = ("fair", "fifo")[seed % 2]
    timeline = run_graph(*drawn(seed, discipline, num=60), record_rates=True)
    assert timeline.rates
    for column in (timeline.end_s, timeline.start_s, timeline.rates.time_s):
      outcomes.append(column.tobytes().hex())
  return "".join(outcomes)


def test_a_run_gives_the_same_bits_every_time():
  first = digest()
  assert first == digest()
  script = "from tests.simulate.test_engine_laws import digest; print(digest())"
  for hash_seed in ("1", "2"):
    done = subprocess.run(
      [sys.executable, "-c", script],
      cwd=ROOT,
      env={**os.environ, "PYTHONHASHSEED": hash_seed},
      capture_output=True,
      text=True,
      check=True,
    )
    assert done.stdout.strip() == first
