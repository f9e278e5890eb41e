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
from dilocox_jax.simulate.graph import Graph
from tests.simulate.graphs import (
  alone,
  carried_bytes,
  drawn,
  ports,
  predecessors,
  recorded,
  ring,
  sends,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Rounding over the some dozen changes of rate that a flow sees.
ROUNDING = 1e-12

DRAWN = st.integers(0, 10_000)


def test_a_link_without_end_leaves_only_compute():
  graph, links, _ = drawn(7, num=200)
  free = {name: math.inf for name in links}
  without = Graph()
  for number, place in enumerate(graph.places):
    after = predecessors(graph, number)
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


@pytest.mark.parametrize("num", range(2, 9))
def test_a_ring_takes_what_its_closed_form_says(num):
  size_bytes, capacity, latency_s = 16e6, 119.55e6, 0.04
  timeline = run_graph(ring(num, size_bytes, latency_s), ports(num, capacity))
  rounds = 2 * (num - 1)
  expected_s = rounds * (size_bytes / num / capacity + latency_s)
  assert timeline.end_s.max() == pytest.approx(expected_s, rel=ROUNDING)


def rates_at_changes(changes, num):
  """Spans between changes, and every flow's rate then."""
  rates, before_s = np.zeros(num), 0.0
  for time_s, number, rate in changes:
    if time_s > before_s:
      yield before_s, time_s, rates
    rates[number], before_s = rate, time_s


@given(DRAWN)
def test_bytes_are_neither_lost_nor_made(seed):
  graph, links, outages = drawn(seed)
  _, changes = recorded(graph, links, outages)
  carried = np.zeros(len(graph))
  for start_s, stop_s, rates in rates_at_changes(changes, len(graph)):
    carried += rates * (stop_s - start_s)
  sizes = [
    0.0 if isinstance(place, str) else amount
    for place, amount in zip(graph.places, graph.amounts, strict=True)
  ]
  np.testing.assert_allclose(carried, sizes, atol=1e-9)
  for name in links:
    crossing = [name in place for place in graph.places]
    expected = carried[crossing].sum()
    assert carried_bytes(graph)[name] == pytest.approx(expected, abs=1e-9)


@given(DRAWN)
def test_no_link_is_ever_above_its_capacity(seed):
  graph, links, outages = drawn(seed)
  _, changes = recorded(graph, links, outages)
  places = graph.places
  crosses = {name: np.array([name in p for p in places]) for name in links}
  for start_s, stop_s, rates in rates_at_changes(changes, len(graph)):
    middle_s = (start_s + stop_s) / 2
    down = {o.link for o in outages if o.start_s < middle_s < o.stop_s}
    for name, capacity in links.items():
      capacity = 0 if name in down else capacity
      assert rates[crosses[name]].sum() <= capacity * (1 + ROUNDING)


def stepped(graph, links):
  """The oracle: all rates anew at each change, flows only; ends."""
  names = list(links)
  capacities = [links[name] for name in names]
  num, now_s = len(graph), 0.0
  left = np.array(graph.amounts)
  sent_s, end_s = np.full(num, math.inf), np.full(num, math.inf)
  while np.isinf(end_s).any():
    ready = [
      max([end_s[p] for p in predecessors(graph, number)], default=0.0)
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
      after = [numbers[p] for p in predecessors(whole, number) if p in numbers]
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


@given(DRAWN)
def test_tasks_of_a_resource_run_in_order_of_readiness(seed):
  graph, links, _ = drawn(seed)
  # Links limit nobody here, and no flow is infinitely fast.
  for number, limit in enumerate(graph.limits_bytes_per_s):
    graph.limits_bytes_per_s[number] = min(limit, 6.0)
  timeline = run_graph(graph, {name: math.inf for name in links})
  ready_s = [
    max([0.0, *timeline.end_s[predecessors(graph, number)]])
    for number in range(len(graph))
  ]
  free_s = {}
  for number in sorted(range(len(graph)), key=lambda n: (ready_s[n], n)):
    place, duration_s = graph.places[number], graph.amounts[number]
    start_s = ready_s[number]
    if isinstance(place, str):
      start_s = max(start_s, free_s.get(place, 0.0))
      free_s[place] = start_s + duration_s
    else:
      duration_s /= graph.limits_bytes_per_s[number]
    assert timeline.start_s[number] == start_s
    end_s = start_s + duration_s + graph.latencies_s[number]
    assert timeline.end_s[number] == end_s


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
  faster = {name: capacity * factor for name, capacity in links.items()}
  fast_s = run_graph(graph, faster).end_s
  np.testing.assert_allclose(fast_s * factor, slow_s, rtol=ROUNDING)


def digest():
  """All bits of a few outcomes."""
  outcomes = []
  for seed in range(20):
    timeline, changes = recorded(*drawn(seed, num=60))
    rates = np.array(changes, np.float64)
    for column in (timeline.end_s, timeline.start_s, rates):
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
