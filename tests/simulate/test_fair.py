import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.simulate.fair import Flow, Sharing, max_min_rates

# Rounding of sums over the few dozen flows of a link.
ROUNDING = 1e-12

RATES = st.floats(0.1, 100.0)


@st.composite
def problems(draw):
  """Routes, ceilings and capacities."""
  num_links = draw(st.integers(1, 7))
  links = st.integers(0, num_links - 1)
  route = st.lists(links, min_size=1, max_size=4, unique=True)
  routes = draw(st.lists(route, min_size=1, max_size=12))
  capacity = st.one_of(RATES, st.sampled_from([0.0, 1.0, 2.0, 6.0]))
  ceiling = st.one_of(RATES, st.sampled_from([1.0, math.inf]))
  num = len(routes)
  ceilings = draw(st.lists(ceiling, min_size=num, max_size=num))
  capacities = draw(st.lists(capacity, min_size=num_links, max_size=num_links))
  return [tuple(route) for route in routes], ceilings, capacities


def filled(routes, ceilings, capacities):
  """The oracle: raises all free rates together until something stops them."""
  capacities, ceilings = np.array(capacities), np.array(ceilings)
  crosses = np.zeros((len(capacities), len(routes)))
  for flow, route in enumerate(routes):
    crosses[list(route), flow] = 1
  rates = np.zeros(len(routes))
  free = np.ones(len(routes), bool)
  while free.any():
    room = np.maximum(capacities - crosses @ rates, 0)
    num_free = crosses @ free
    steps = np.divide(room, num_free, where=num_free > 0, out=room * 0 + np.inf)
    rise = min(steps.min(), (ceilings - rates)[free].min())
    rates[free] += rise
    full = (capacities - crosses @ rates <= 1e-9 * capacities) & (num_free > 0)
    stopped = (ceilings - rates <= 1e-9 * rates) | (crosses[full].any(axis=0))
    assert (stopped & free).any()
    free &= ~stopped
  return rates


@given(problems())
def test_rates_are_those_of_progressive_filling(problem):
  np.testing.assert_allclose(
    max_min_rates(*problem), filled(*problem), rtol=1e-7, atol=1e-9
  )


@given(problems())
def test_no_link_carries_more_than_it_can(problem):
  routes, ceilings, capacities = problem
  rates = max_min_rates(*problem)
  for link, capacity in enumerate(capacities):
    crossing = [
      r for r, path in zip(rates, routes, strict=True) if link in path
    ]
    assert sum(crossing) <= capacity * (1 + ROUNDING)
  assert all(r <= c for r, c in zip(rates, ceilings, strict=True))


@given(problems())
def test_every_flow_is_at_its_ceiling_or_highest_on_a_full_link(problem):
  routes, ceilings, capacities = problem
  rates = max_min_rates(*problem)

  def stops(link, rate):
    crossing = [
      r for r, path in zip(rates, routes, strict=True) if link in path
    ]
    is_full = sum(crossing) >= capacities[link] * (1 - ROUNDING)
    return is_full and rate >= max(crossing) * (1 - ROUNDING)

  for rate, ceiling, route in zip(rates, ceilings, routes, strict=True):
    assert rate == ceiling or any(stops(link, rate) for link in route)


def test_the_textbook_example_has_the_textbook_answer():
  # One long flow over three links, and others that share each of them.
  routes = [(0, 1, 2), (0,), (1,), (1,), (2,)]
  rates = max_min_rates(routes, [math.inf] * 5, [6.0, 6.0, 12.0])
  assert rates == [2.0, 4.0, 2.0, 2.0, 10.0]


def test_what_one_cannot_use_goes_to_the_others():
  rates = max_min_rates([(0,)] * 3, [1.0, math.inf, math.inf], [9.0])
  assert rates == [1.0, 4.0, 4.0]


@pytest.mark.parametrize("ceiling", [2.0, math.inf])
def test_a_link_without_end_limits_nobody(ceiling):
  routes = [(0,), (0, 1), (0, 1)]
  rates = max_min_rates(routes, [ceiling] * 3, [math.inf, 3.0])
  assert rates == [ceiling, 1.5, 1.5]


def test_a_dead_link_stops_its_flows_only():
  rates = max_min_rates([(0, 1), (1,), (1,)], [math.inf] * 3, [0.0, 8.0])
  assert rates == [0.0, 4.0, 4.0]


@pytest.mark.parametrize("num_sites", [2, 3, 4, 7, 11, 16, 32, 45])
def test_flows_in_the_same_position_have_the_same_rate_bit_for_bit(num_sites):
  # A site's one link carries what it sends and what it receives.
  pairs = list(itertools.combinations(range(num_sites), 2))
  capacity = 119550858.65257595
  rates = max_min_rates(pairs, [math.inf] * len(pairs), [capacity] * num_sites)
  assert set(rates) == {capacity / (num_sites - 1)}


@given(st.integers(0, 10_000))
def test_solving_what_changed_equals_solving_everything(seed):
  draw = random.Random(seed)
  num_links = draw.randint(2, 10)
  sharing = Sharing([draw.uniform(1, 9) for _ in range(num_links)])
  for number in range(40):
    kind = draw.random()
    if kind < 0.3 and sharing.flows:
      sharing.remove(draw.choice(list(sharing.flows)))
    elif kind < 0.4:
      capacity = draw.choice([0.0, draw.uniform(1, 9)])
      sharing.set_capacity(draw.randrange(num_links), capacity)
    else:
      route = tuple(draw.sample(range(num_links), draw.randint(1, 2)))
      ceiling = draw.choice([draw.uniform(0.1, 3), math.inf])
      sharing.add(Flow(number, route, 1e9, ceiling))
    sharing.settle(float(number))
    flows = list(sharing.flows.values())
    everything = max_min_rates(
      [flow.route for flow in flows],
      [flow.ceiling for flow in flows],
      sharing.capacities,
    )
    rates = [flow.rate for flow in flows]
    np.testing.assert_allclose(rates, everything, rtol=ROUNDING)


def test_only_flows_joined_by_links_are_solved_again():
  sharing = Sharing([1.0, 1.0, 8.0, 8.0])
  for number, route in enumerate([(0, 1), (1,), (2,), (2, 3)]):
    sharing.add(Flow(number, route, 8.0, math.inf))
  sharing.settle(0.0)
  assert sharing.num_solves == 2
  sharing.add(Flow(4, (0,), 8.0, math.inf))
  sharing.settle(1.0)
  assert sharing.num_solves == 3
  assert [flow.since_s for flow in sharing.flows.values()][2:4] == [0.0, 0.0]


def test_the_first_of_each_group_is_due():
  sharing = Sharing([2.0, 4.0])
  for number, (route, size_bytes) in enumerate(
    [((0,), 3.0), ((0,), 2.0), ((0,), 2.0), ((1,), 8.0)]
  ):
    sharing.add(
      Flow(number, route, size_bytes, 0.5 if number == 0 else math.inf)
    )
  due = sharing.settle(1.0)
  shared_s = 1 + 2 / 0.75
  assert sorted(due) == [(3.0, 3), (shared_s, 1), (shared_s, 2)]
