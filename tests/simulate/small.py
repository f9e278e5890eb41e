"""Small runs and clusters for the simulator's tests."""

from typing import Any

import numpy as np

from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.codecs.low_rank import LowRank
from dilocox_jax.codecs.quantize import Float, Int
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.membership import Membership
from dilocox_jax.plan.schedule.methods import named_method
from dilocox_jax.plan.schedule.run_plan import RunPlan
from dilocox_jax.simulate.cluster import Cluster
from dilocox_jax.simulate.link_costs import LinkCosts
from dilocox_jax.simulate.outcome import Work
from dilocox_jax.simulate.script import Script
from dilocox_jax.simulate.sites import Jitter, Link, Site
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
  "rank 16": LowRank(16, then=Int(4)),
}


def link(bps=1e8, **changes):
  return Link(bps, bps, **changes)


def cluster(num_replicas=2, jitter=None, **changes):
  sites = tuple(
    Site(f"site {number}", link(**changes)) for number in range(num_replicas)
  )
  return Cluster("test", sites, jitter=jitter or Jitter())


def script(method="diloco", num_replicas=2, codec="fp32", **settings):
  """A script and the plan that goes with it."""
  plan_settings: dict[str, Any] = {"total_steps": 40} | {
    key: settings.pop(key)
    for key in ("total_steps", "warm_start", "warm_start_steps")
    if key in settings
  }
  members = settings.pop("membership", None)
  chosen = named_method(method, **settings)
  fragments = Fragments(
    chosen.schedule.num_fragments,
    6,
    chosen.fragment_order,
  )
  traffic = Traffic(chosen, fragments, SHAPES, num_replicas, CODECS[codec])
  if members is not None:
    members = Membership(chosen.schedule, num_replicas, **members)
  plan = RunPlan(chosen, membership=members, **plan_settings)
  # While one replica copies another, a third may send over the same link. The
  # formula does not see that, so copies are free where replicas come and go.
  return Script(traffic, copied_bytes=0 if members else 3_000_000), plan


def link_costs(one, transport=PLAIN):
  return LinkCosts(one, transport)


def work(one, step_s=0.05, codec_s=0.0, speeds=None):
  full = np.ones(one.num_replicas)
  speeds = full if speeds is None else np.asarray(speeds)
  return Work(full * step_s / speeds, full * codec_s)
