"""The bench `simulate`: how much the event engine does in a second of one core.

Rates are absolute, not ratios: what counts is whether a graph of millions of
events takes seconds or hours. Only the seconds for which the process had a core
count, so a busy machine changes the rates less. JAX is not loaded.
"""

import dataclasses
import operator
import pathlib
import platform
import random
import time
from collections.abc import Callable, Mapping

from rich.progress import track

from dilocox_jax.simulate.engine import Timeline
from dilocox_jax.simulate.engine import run_graph as simulate
from dilocox_jax.simulate.graph import Graph
from experiments.benchmarks.record import keep_record, spread, spread_table

NUM_CONCURRENT = 32


@dataclasses.dataclass(frozen=True)
class Rate:
  """Something counted, for each second that the engine takes.

  Attributes:
    name: What is counted.
    graph: What is simulated.
    links: On which links.
    count: How often it happened.
    bound: The rate must be at least this (1/s).
  """

  name: str
  graph: Graph
  links: Mapping[str, float]
  count: Callable[[Timeline], int]
  bound: float


def queued(num_sites: int, num_rounds: int) -> tuple[Graph, dict]:
  """Sites that compute and pass something on in a ring."""
  graph = Graph()
  links = {
    f"{way}{site}": 1e8 for way in ("up", "down") for site in range(num_sites)
  }
  last: list[tuple[int, ...]] = [()] * num_sites
  for _ in range(num_rounds):
    steps, sent = [], []
    for site in range(num_sites):
      # Sites differ, so that few events share a time.
      step = graph.task("step", f"gpu{site}", 1 + 0.01 * site, last[site])
      path = (f"up{site}", f"down{(site + 1) % num_sites}")
      steps.append(step)
      sent.append(graph.flow("send", path, 1e8 + site, (step,), 0.01))
    last = [(steps[site], sent[site - 1]) for site in range(num_sites)]
  return graph, links


def contended(
  num_sites: int, num_flows: int, limit: Callable[[random.Random], float]
) -> tuple[Graph, dict]:
  """Flows between random sites, NUM_CONCURRENT at a time, over fair links."""
  draw, graph, last = random.Random(0), Graph(), {}
  links = {
    f"{way}{site}": draw.uniform(50e6, 200e6)
    for way in ("up", "down")
    for site in range(num_sites)
  }
  for number in range(num_flows):
    source, target = draw.sample(range(num_sites), 2)
    lane = number % NUM_CONCURRENT
    last[lane] = graph.flow(
      "send",
      (f"up{source}", f"down{target}"),
      draw.uniform(1e6, 1e8),
      (last[lane],) if lane in last else (),
      limit_bytes_per_s=limit(draw),
    )
  return graph, links


def rates() -> list[Rate]:
  """What is measured, and what must be reached."""
  limited = contended(8, 6400, lambda draw: draw.uniform(5e6, 50e6))
  unlimited = contended(8, 6400, lambda draw: float("inf"))
  events = operator.attrgetter("num_events")
  solves = operator.attrgetter("num_solves")
  return [
    Rate("events", *queued(64, 200), events, 100_000),
    Rate("solves of 32 flows", *unlimited, solves, 10_000),
    Rate("solves of 32 flows with limits", *limited, solves, 10_000),
  ]


def measure_rate(rate: Rate, repeats: int) -> dict[str, float | bool]:
  """Simulates several times and takes the median rate.

  Args:
    rate: What is counted.
    repeats: How often to simulate.
  """
  values, count = [], 0
  for _ in track(range(repeats), description=rate.name):
    started_s = time.process_time()
    count = rate.count(simulate(rate.graph, rate.links))
    values.append(count / (time.process_time() - started_s))
  return spread(values, rate.bound, is_least=True) | {"count": count}


def run_rates(workdir: pathlib.Path, repeats: int) -> None:
  """Measures all rates, writes bench_simulate.json and prints a table.

  Args:
    workdir: Directory of the file.
    repeats: Measurements of every rate.
  """
  results = {rate.name: measure_rate(rate, repeats) for rate in rates()}
  record = {
    "python": platform.python_version(),
    "repeats": repeats,
    "label": "measured: medians, in one second of one core",
    "rates": results,
  }
  title = "Per second of one core, measured"
  table = spread_table(title, "at least", results, ",.0f")
  keep_record(workdir, "simulate", record, table)
