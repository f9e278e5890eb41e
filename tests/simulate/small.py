"""Small runs and clusters for the simulator's tests."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.quantize import Float, Int
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.membership import Membership
from dilocox_jax.plan.schedule.methods import named_method
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.simulate.analytic import Work
from dilocox_jax.simulate.cluster import Cluster, Link, Site
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.script import Script
from dilocox_jax.simulate.transfer import Transport

# Whole messages, and half a round trip each.
PLAIN = Transport(starts_slowly=False)
SHAPES = {
  "embed/embedding": (256, 96),
  "blocks/mlp/up/kernel": (6, 96, 200),
  "head/kernel": (96, 256),
}
CODECS = {
  "fp32": Float(),
  "int4": Int(4),
  "int8": Int(8),
  "rank 2": LowRank(2, then=Int(4)),
}


def _of(method, interval, **settings):
  return pytest.param(
    method,
    {"sync_interval": interval} | settings,
    id=f"{method} {' '.join(map(str, settings.values()))}",
  )


SCHEDULES = [
  _of("diloco", 7),
  _of("dilocox", 8),
  _of("eager", 5, num_fragments=3),
  _of("streaming_diloco", 9, overlap_steps=4),
  _of("delayed", 4, num_fragments=2, overlap_steps=6),
  _of("delayed", 3, overlap_steps=7),
  _of("delayed", 6, num_fragments=3, fragment_order="sequential"),
  _of("overlap_loco", 6, num_fragments=6, total_steps=14),
  pytest.param("allreduce", {"total_steps": 9}, id="allreduce"),
  _of("dilocox", 10, warm_start_steps=5),
  _of("diloco", 8, first_interval=2, steps_per_doubling=8),
  _of(
    "overlap_loco",
    8,
    num_fragments=2,
    first_interval=4,
    steps_per_doubling=8,
  ),
]
# Copies of the state leave replicas out of step. Absences are drawn, so that
# any number of replicas will do.
COPIED = [
  _of("diloco", 4, membership={"absence_rate": 0.4, "seed": 3}),
  _of("delayed", 6, overlap_steps=9, membership={"absence_rate": 0.4}),
]


def link(bps=1e8, **changes):
  return Link(bps, bps, **changes)


def cluster(num_replicas=2, placement=(), **changes):
  links = [link(**changes)] * num_replicas
  sites = tuple(Site(f"site {n}", each) for n, each in enumerate(links))
  return Cluster("test", sites, placement)


def uneven(rates_bps, **changes):
  """A cluster of replicas with links of their own."""
  one = cluster(len(rates_bps), **changes)
  sites = tuple(
    dataclasses.replace(site, link=link(bps, rtt_s=1e6 / bps))
    for site, bps in zip(one.sites, rates_bps, strict=True)
  )
  return dataclasses.replace(one, sites=sites)


def script(method="diloco", num_replicas=2, codec="fp32", **settings):
  """A script and the plan that goes with it."""
  plan_settings: dict[str, Any] = {"total_steps": 26} | {
    key: settings.pop(key)
    for key in ("total_steps", "warm_start_steps")
    if key in settings
  }
  members = settings.pop("membership", None)
  if method == "allreduce":
    settings.pop("sync_interval", None)
  chosen = named_method(method, **settings)
  count = chosen.schedule.num_fragments
  order = chosen.fragment_order
  fragments = Fragments(count, 6, order)
  traffic = Traffic(chosen, fragments, SHAPES, num_replicas, CODECS[codec])
  if members is not None:
    members = Membership(chosen.schedule, num_replicas, **members)
  plan = RunPlan(chosen, membership=members, **plan_settings)
  # While one replica copies another, a third may send over the same link. The
  # formula does not see that, so copies are free where replicas come and go.
  return Script(traffic, copied_bytes=0 if members else 3_000_000), plan


def ops_up_to(script, plan, stop):
  """The ops of a run up to a step at which a segment ends, without a flush."""
  segments = dataclasses.replace(plan, total_steps=stop).segments()
  return [op for each in segments for op in script.segment(each)]


def link_costs(one, transport=PLAIN):
  return LinkCosts(one, transport)


def work(one, step_s=0.05, codec_s=0.0, speeds=None):
  full = np.ones(one.num_replicas)
  speeds = full if speeds is None else np.asarray(speeds)
  return Work(full * step_s / speeds, full * codec_s)


def assert_agree(by_formula, by_events):
  """Holds two outcomes equal but for rounding."""
  for field in dataclasses.fields(by_formula):
    own, other = (getattr(x, field.name) for x in (by_formula, by_events))
    tolerance = 1e-9 * by_formula.total_s
    np.testing.assert_allclose(other, own, 1e-9, tolerance, err_msg=field.name)
