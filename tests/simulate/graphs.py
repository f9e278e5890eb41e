"""Graphs and links that tests of the engine share."""

import collections
import math
import random
from unittest import mock

from dilocox_jax.simulate import engine
from dilocox_jax.simulate.fair import Sharing
from dilocox_jax.simulate.graph import Graph, Outage


def alone(capacity=4.0):
  return {"up": capacity}


def predecessors(graph, number):
  """The numbers that a node waits for."""
  start = graph.after_stop[number - 1] if number else 0
  return graph.after[start : graph.after_stop[number]].tolist()


class RecordedSharing(Sharing):
  """Keeps every change of a flow's rate: (seconds, number, bytes per second).

  A flow that is through, or whose link is down, has rate 0.
  """

  def __init__(self, capacities):
    super().__init__(capacities)
    self.changes = []
    self._rates = {}

  def settle(self, now_s):
    due = super().settle(now_s)
    rates = {number: flow.rate for number, flow in self.flows.items()}
    for number in sorted(rates.keys() | self._rates.keys()):
      rate = rates.get(number, 0.0)
      if rate != self._rates.get(number, 0.0):
        self.changes.append((now_s, number, rate))
    self._rates = rates
    return due


def recorded(graph, links, outages=()):
  """A timeline, and the changes of rates on the way."""
  sharings = []

  def make(capacities):
    sharings.append(RecordedSharing(capacities))
    return sharings[-1]

  with mock.patch.object(engine, "Sharing", make):
    timeline = engine.run_graph(graph, links, outages)
  return timeline, sharings[0].changes


def sends(*sizes, **fields):
  """Flows over one link, all ready at once."""
  graph = Graph()
  for size_bytes in sizes:
    graph.flow("send", ("up",), size_bytes, **fields)
  return graph


def carried_bytes(graph):
  """The bytes that flows carry over each link that they cross."""
  carried = collections.Counter()
  for place, amount in zip(graph.places, graph.amounts, strict=True):
    if not isinstance(place, str):
      carried.update(dict.fromkeys(place, amount))
  return carried


def ring(num, size_bytes, latency_s=0.0):
  """A ring all-reduce; a rank passes on what it was just sent."""
  graph = Graph()
  last = [()] * num
  for _ in range(2 * (num - 1)):
    chunks = [
      graph.flow(
        "chunk",
        (f"up{rank}", f"down{(rank + 1) % num}"),
        size_bytes / num,
        last[rank],
        latency_s,
      )
      for rank in range(num)
    ]
    last = [(chunks[rank], chunks[rank - 1]) for rank in range(num)]
  return graph


def ports(num, capacity):
  names = [f"{way}{rank}" for way in ("up", "down") for rank in range(num)]
  return {name: capacity for name in names}


def drawn(seed, num=40, sizes=(1.0, 10.0)):
  """Tasks and flows that wait for each other, links, and outages."""
  draw = random.Random(seed)
  graph = Graph()
  names = [f"link{index}" for index in range(draw.randint(1, 6))]
  for number in range(num):
    after = draw.sample(range(number), min(number, draw.randint(0, 3)))
    if draw.random() < 0.4:
      duration_s = draw.choice([0.0, 1.0, draw.random()])
      graph.task("step", f"gpu{draw.randrange(3)}", duration_s, after)
      continue
    route = draw.sample(names, draw.randint(1, min(3, len(names))))
    graph.flow(
      "send",
      tuple(route),
      draw.choice([0.0, 1.0, draw.uniform(*sizes)]),
      after,
      draw.choice([0.0, 0.5]),
      draw.choice([math.inf, draw.uniform(1, 5)]),
    )
  links = {name: draw.uniform(1, 9) for name in names}
  outages = [
    Outage(draw.choice(names), start_s, start_s + draw.random() * 3)
    for start_s in (draw.random() * 10 for _ in range(draw.randint(0, 4)))
  ]
  return graph, links, outages
