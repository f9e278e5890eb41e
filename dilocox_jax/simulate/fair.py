"""Max-min fair rates: what TCP flows over shared links get, to first order.

Rates are max-min fair if no flow's rate can rise without lowering the rate of
a flow that has no more than it. Example: links A and B of 1 Gbit/s each; flow
1 crosses A and B, flows 2 and 3 cross A only. A is the tightest link: its
three flows get 1/3 Gbit/s each. A fourth flow that crosses only B gets what
flow 1 leaves there, 2/3 Gbit/s. Even shares of B, 1/2 each, would waste 1/6.

When something changes, only the flows that are connected to it by shared links
are solved again. Bytes left are counted from the last change of a flow's own
rate, so a flow whose rate never changes ends at exactly size / rate after its
start.

Source: Bertsekas and Gallager, 1992, "Data Networks", 6.5.2.
"""

import collections
import dataclasses
import heapq
import math
from collections.abc import Sequence

# Shares and durations whose relative difference is smaller than this differ by
# rounding alone. A link of n flows needs n subtractions to find what is left
# for the last flow, so the error is larger than that of one operation.
_ROUNDING = 2.0**-42
_SAME = 1 + _ROUNDING
# Two sums of times with a smaller ratio are the same time.
_SAME_TIME = 1 + 2.0**-50

# The links that a flow crosses, as indices into a list of capacities.
LinkIndices = Sequence[int]


def max_min_rates(
  routes: Sequence[LinkIndices],
  ceilings: Sequence[float],
  capacities: Sequence[float],
) -> list[float]:
  """Computes the max-min fair rates of flows that share links.

  All rates rise together. A flow stops at its own ceiling, or when one of its
  links is full.

  Args:
    routes: Links of every flow, as indices into `capacities`.
    ceilings: Limit of every flow alone (bytes per second).
    capacities: Capacity of every link (bytes per second).

  Returns:
    The rate of every flow (bytes per second); infinity if nothing limits it.
  """
  flows_of: dict[int, list[int]] = collections.defaultdict(list)
  for flow, route in enumerate(routes):
    for link in route:
      flows_of[link].append(flow)
  rates = list(ceilings)
  for link, flows in flows_of.items():
    # A link with a single flow limits that flow as its own ceiling does.
    if len(flows) == 1 and capacities[link] < rates[flows[0]]:
      rates[flows[0]] = capacities[link]
  left, shares = {}, []
  for link, flows in flows_of.items():
    capacity = capacities[link]
    # A link that has room for all ceilings together limits no flow.
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
  """Lowers ceilings to rates, the link with the smallest share first.

  A flow is settled when its rate is final. Settling a flow only raises the
  share of the flows that remain on its links, because it takes at most that
  share. So an old entry of the heap is too low, never too high, and it is
  enough to check the lowest entry before it is used.

  Args:
    routes: Links of every flow.
    rates: Ceilings of the flows; holds their rates afterwards.
    flows_of: Flows of every link.
    left: Capacity that settled flows leave, for links that may fill up.
    shares: Heap of (left / number of flows not settled, link).
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
      # The entry was old. Look again which link has the smallest share.
      heapq.heapreplace(shares, (now, link))
      continue
    while order[-1] not in unsettled:
      order.pop()
    # Either the lowest ceiling is reached first, or this link is full.
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


@dataclasses.dataclass(slots=True, eq=False)
class Flow:
  """A flow under way.

  Attributes:
    number: Its number in the graph.
    route: Its links.
    left: Bytes that were left at `since_s`.
    ceiling: Its own limit (bytes per second).
    since_s: When its rate changed last (seconds).
    rate: Rate since then (bytes per second).
    finish_s: When it is through at this rate (seconds).
    due_s: `finish_s` if it is the first of its group to be through, else
      infinity: the others will be solved again before they are through.
  """

  number: int
  route: LinkIndices
  left: float
  ceiling: float
  since_s: float = 0.0
  rate: float = 0.0
  finish_s: float = math.inf
  due_s: float = math.inf

  def set_rate(self, rate: float, now_s: float) -> None:
    """Subtracts the bytes sent at the old rate, and goes on at a new one."""
    if rate == self.rate:
      return
    if self.rate:
      gone = self.rate * (now_s - self.since_s)
      self.left = max(self.left - gone, 0.0)
    self.since_s = now_s
    self.rate = rate
    self.finish_s = now_s + self.left / rate if rate else math.inf


class Sharing:
  """Links, the flows under way on them, and when each flow will be through."""

  def __init__(self, capacities: Sequence[float]):
    """Starts with idle links.

    Args:
      capacities: Capacity of every link (bytes per second).
    """
    self.capacities = list(capacities)
    self.flows: dict[int, Flow] = {}
    self.num_solves = 0
    self._flows_of: list[dict[Flow, None]] = [{} for _ in self.capacities]
    self._touched: dict[Flow, None] = {}  # Rates to find anew.

  def add(self, flow: Flow) -> None:
    """Starts a flow; `settle` finds its rate."""
    self.flows[flow.number] = flow
    self._touched[flow] = None
    for link in flow.route:
      self._flows_of[link][flow] = None

  def remove(self, number: int) -> None:
    """Ends a flow whose last byte has left."""
    flow = self.flows.pop(number)
    for link in flow.route:
      others = self._flows_of[link]
      del others[flow]
      self._touched.update(others)
    self._touched.pop(flow, None)

  def set_capacity(self, link: int, bytes_per_s: float) -> None:
    """Sets the capacity of a link, which has failed or come back."""
    self.capacities[link] = bytes_per_s
    self._touched.update(self._flows_of[link])

  def settle(self, now_s: float) -> list[tuple[float, int]]:
    """Finds the rates of all flows that a change may have affected.

    Args:
      now_s: The time (seconds).

    Returns:
      (seconds, number of the flow) of the next flows that will be through, the
      first of every group of connected flows. If a rate changes before, the
      entry is void, and the flow's `due_s` differs from it.
    """
    due: list[tuple[float, int]] = []
    touched = self._touched
    while touched:
      flow, _ = touched.popitem()
      if self._is_alone(flow):
        limits = [self.capacities[link] for link in flow.route]
        flow.set_rate(min(limits + [flow.ceiling]), now_s)
        flow.due_s = flow.finish_s
        if flow.due_s < math.inf:
          due.append((flow.due_s, flow.number))
        continue
      flows = self._joined(flow)
      for flow in flows:
        touched.pop(flow, None)
      self._solve(flows, now_s)
      first_s = min([flow.finish_s for flow in flows])
      # Flows that should end together must end at the same float.
      last_s = first_s * _SAME_TIME + (first_s - now_s) * _ROUNDING
      for flow in flows:
        is_first = flow.finish_s <= last_s
        flow.due_s = first_s if is_first else math.inf
        if flow.due_s < math.inf:
          due.append((first_s, flow.number))
    return due

  def _joined(self, flow: Flow) -> list[Flow]:
    """Returns all flows that share links with it, directly or indirectly."""
    joined = {flow: None}
    links: set[int] = set()
    newest = [flow]
    while newest:
      reached: dict[Flow, None] = {}
      for flow in newest:
        for link in flow.route:
          if link not in links:
            links.add(link)
            reached.update(self._flows_of[link])
      newest = [flow for flow in reached if flow not in joined]
      joined.update(reached)
    return list(joined)

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
      flow.set_rate(rate, now_s)
