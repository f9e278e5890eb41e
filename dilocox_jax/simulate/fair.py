"""Max-min fair rates: what TCP flows over shared links get, to first order.

Nobody's rate can rise without lowering that of a flow that has no more. A
change re-solves only the flows that are joined to it by shared links, and
bytes left are counted from the last change of a flow's own rate, so a flow
that nobody disturbs ends at exactly size / rate after its start.

Source: Bertsekas and Gallager, 1992, "Data Networks", 6.5.2.
"""

import heapq
import math
from collections.abc import Sequence

# Shares and durations that differ by less (relative) differ by rounding alone:
# a link of n flows has n subtractions behind what is left for the last.
_ROUNDING = 2.0**-42
_SAME = 1 + _ROUNDING
# Of sums of times.
_SAME_TIME = 1 + 2.0**-50

LinkIndices = Sequence[int]


def max_min_rates(
  routes: Sequence[LinkIndices],
  ceilings: Sequence[float],
  capacities: Sequence[float],
) -> list[float]:
  """Rates of flows that share links.

  All rates rise together; a flow stops at its own ceiling, or when one of its
  links is full.

  Args:
    routes: The links of every flow, as indices into `capacities`.
    ceilings: Every flow's own limit (bytes per second).
    capacities: What every link can carry (bytes per second).

  Returns:
    The rate of every flow (bytes per second); infinite where nothing limits.
  """
  flows_of: dict[int, list[int]] = {}
  for flow, route in enumerate(routes):
    for link in route:
      if link in flows_of:
        flows_of[link].append(flow)
      else:
        flows_of[link] = [flow]
  rates = list(ceilings)
  for link, flows in flows_of.items():
    # A link of one flow is that flow's own ceiling.
    if len(flows) == 1 and capacities[link] < rates[flows[0]]:
      rates[flows[0]] = capacities[link]
  left, shares = {}, []
  for link, flows in flows_of.items():
    capacity = capacities[link]
    # A link with room for every ceiling limits nobody.
    if sum([rates[flow] for flow in flows]) > capacity:
      left[link] = capacity
      shares.append((capacity / len(flows), link))
  if shares:
    _fill(routes, rates, flows_of, left, shares)
  return rates


def _fill(
  routes: Sequence[LinkIndices],
  rates: list[float],
  flows_of: dict[int, list[int]],
  left: dict[int, float],
  shares: list[tuple[float, int]],
) -> None:
  """Lowers ceilings to rates, the fullest link first.

  Args:
    routes: The links of every flow.
    rates: Ceilings; afterwards rates.
    flows_of: The flows of every link.
    left: Capacity that settled flows leave, of links that may fill up.
    shares: (left / flows not settled, link) of each. May lag behind, and is
      then low: settling flows only raises what is left for each other.
  """
  waiting = {link: len(flows_of[link]) for link in left}
  unsettled = {flow for link in left for flow in flows_of[link]}
  order = sorted(unsettled, key=rates.__getitem__, reverse=True)
  heapq.heapify(shares)
  while unsettled:
    share, link = shares[0]
    if not waiting[link]:
      heapq.heappop(shares)
      continue
    now = left[link] / waiting[link]
    if now > share * _SAME:
      heapq.heapreplace(shares, (now, link))
      continue
    while order[-1] not in unsettled:
      order.pop()
    flows = (order[-1],) if rates[order[-1]] <= share else flows_of[link]
    for flow in flows:
      if flow in unsettled:
        unsettled.remove(flow)
        rate = rates[flow]
        if rate > share:
          rate = rates[flow] = share
        for crossed in routes[flow]:
          if crossed in left:
            left[crossed] -= rate
            waiting[crossed] -= 1


class Flow:
  """A flow under way.

  Attributes:
    number: Its number in the graph.
    route: Its links.
    ceiling: Its own limit (bytes per second).
    left: What was left at `since_s` (bytes).
    since_s: When its rate changed last.
    rate: Since then (bytes per second).
    finish_s: When it is through at this rate.
    due_s: The same if it is the first of those joined to it, else infinity:
      the others will be solved again before their turn.
  """

  __slots__ = (
    "number",
    "route",
    "ceiling",
    "left",
    "since_s",
    "rate",
    "finish_s",
    "due_s",
  )

  def __init__(
    self, number: int, route: LinkIndices, size_bytes: float, ceiling: float
  ):
    self.number = number
    self.route = route
    self.ceiling = ceiling
    self.left = size_bytes
    self.since_s = self.rate = 0.0
    self.finish_s = self.due_s = math.inf

  def set_rate(self, rate: float, now_s: float) -> None:
    """Counts what has gone at the old rate, and goes on at a new one."""
    if self.rate:
      gone = self.rate * (now_s - self.since_s)
      self.left = max(self.left - gone, 0.0)
    self.since_s = now_s
    self.rate = rate
    self.finish_s = now_s + self.left / rate if rate else math.inf


class Sharing:
  """Links, the flows under way on them, and when each will be through."""

  def __init__(self, capacities: Sequence[float]):
    """Starts with idle links.

    Args:
      capacities: Of every link (bytes per second).
    """
    self.capacities = list(capacities)
    self.flows: dict[int, Flow] = {}
    self.num_solves = 0
    self._flows_of: list[dict[Flow, None]] = [{} for _ in self.capacities]
    self._touched: dict[Flow, None] = {}  # Their rates may be wrong.

  def add(
    self, number: int, route: LinkIndices, size_bytes: float, ceiling: float
  ) -> None:
    """A flow begins; `settle` finds its rate."""
    flow = self.flows[number] = Flow(number, route, size_bytes, ceiling)
    self._touched[flow] = None
    for link in route:
      self._flows_of[link][flow] = None

  def remove(self, number: int) -> None:
    """A flow is through."""
    flow = self.flows.pop(number)
    for link in flow.route:
      others = self._flows_of[link]
      del others[flow]
      if others:
        self._touched.update(others)
    self._touched.pop(flow, None)

  def set_capacity(self, link: int, bytes_per_s: float) -> None:
    """A link fails or comes back."""
    self.capacities[link] = bytes_per_s
    self._touched.update(self._flows_of[link])

  def settle(self, now_s: float) -> list[tuple[float, int]]:
    """Solves what has changed.

    Args:
      now_s: The time.

    Returns:
      When (seconds) which flows will be through unless something changes
      before: the first of every group that links join. A flow's `due_s` tells
      later whether that still holds.
    """
    due: list[tuple[float, int]] = []
    touched = self._touched
    while touched:
      flow, _ = touched.popitem()
      if self._is_alone(flow):
        limits = [self.capacities[link] for link in flow.route]
        self._set_rate(flow, min(limits + [flow.ceiling]), now_s)
        flow.due_s = flow.finish_s
        if flow.due_s < math.inf:
          due.append((flow.due_s, flow.number))
        continue
      flows = self._joined(flow)
      for flow in flows:
        touched.pop(flow, None)
      self._solve(flows, now_s)
      first_s = min([flow.finish_s for flow in flows])
      last_s = first_s * _SAME_TIME + (first_s - now_s) * _ROUNDING
      for flow in flows:
        is_first = flow.finish_s <= last_s
        flow.due_s = first_s if is_first else math.inf
        if flow.due_s < math.inf:
          due.append((first_s, flow.number))
    return due

  def _joined(self, flow: Flow) -> list[Flow]:
    """All flows that share links with it, directly or through others."""
    found = {flow: None}
    links: set[int] = set()
    newest = [flow]
    while newest:
      reached: dict[Flow, None] = {}
      for flow in newest:
        for link in flow.route:
          if link not in links:
            links.add(link)
            reached.update(self._flows_of[link])
      newest = [flow for flow in reached if flow not in found]
      found.update(reached)
    return list(found)

  def _is_alone(self, flow: Flow) -> bool:
    for link in flow.route:
      if len(self._flows_of[link]) > 1:
        return False
    return True

  def _solve(self, flows: list[Flow], now_s: float) -> None:
    self.num_solves += 1
    routes = [flow.route for flow in flows]
    ceilings = [flow.ceiling for flow in flows]
    rates = max_min_rates(routes, ceilings, self.capacities)
    for flow, rate in zip(flows, rates, strict=True):
      self._set_rate(flow, rate, now_s)

  def _set_rate(self, flow: Flow, rate: float, now_s: float) -> None:
    if rate != flow.rate:
      flow.set_rate(rate, now_s)
