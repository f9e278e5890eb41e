"""What formulas cannot say: outages, bytes on links, uneven sharing."""

import dataclasses

import numpy as np
import pytest

from dilocox_jax.plan.collective import Collective
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.script import Launch
from dilocox_jax.simulate.sites import SiteOutage
from tests.oracles.events import lower, simulate
from tests.simulate import small
from tests.simulate.test_agreement import METHODS, assert_agree, both


def engine(one, script, plan):
  return simulate(small.link_costs(one), small.work(one), script.ops(plan))


@pytest.mark.parametrize("outage_s", [0.5, 20.0])
def test_an_outage_delays_a_blocked_exchange_by_its_length(outage_s):
  one = small.cluster(2, rtt_s=0.0)
  script, plan = small.script("diloco", sync_interval=10, total_steps=10)
  before = engine(one, script, plan)
  start_s = 0.05 * 10 + 1e-3  # The exchange has just begun.
  away = SiteOutage("site 1", start_s, start_s + outage_s)
  cut = dataclasses.replace(one, outages=(away,))
  after = engine(cut, script, plan)
  assert after.total_s - before.total_s == pytest.approx(outage_s)


def test_an_outage_while_nobody_sends_costs_nothing():
  one = small.cluster(2)
  script, plan = small.script("diloco", sync_interval=10, total_steps=10)
  cut = dataclasses.replace(one, outages=(SiteOutage("site 0", 0.0, 0.4),))
  assert engine(cut, script, plan).total_s == engine(one, script, plan).total_s


@pytest.mark.parametrize("name, changes", METHODS)
def test_links_carry_what_the_plan_says_and_no_more(name, changes):
  one = small.cluster(3)
  script, plan = small.script(name, 3, **changes)
  link_costs, expected = small.link_costs(one), {}
  lowered = lower(link_costs, small.work(one), script.ops(plan))
  for op in script.ops(plan):
    if not isinstance(op, Launch):
      continue
    for operation in op.operations:
      ring = link_costs.among(op.members)
      for link, size in ring.link_bytes(operation).items():
        expected[link] = expected.get(link, 0) + size
  carried = lowered.graph.carried_bytes()
  assert carried == pytest.approx(expected)
  ups = [v for k, v in carried.items() if k.startswith("up:")]
  launched = (op for op in script.ops(plan) if isinstance(op, Launch))
  if "membership" in changes:  # Replicas send unequally often.
    return
  sent = sum(each.sent_bytes(3) for op in launched for each in op.operations)
  assert max(ups) == pytest.approx(sent, rel=1e-5)  # Bytes are whole there.


def test_eight_uneven_replicas_collapse_to_the_formula():
  rng = np.random.default_rng(3)
  base = small.cluster(8)
  sites = tuple(
    dataclasses.replace(
      site,
      link=small.link(float(rng.uniform(1e7, 1e9)), rtt_s=rng.uniform(0, 0.2)),
    )
    for site in base.sites
  )
  one = dataclasses.replace(base, sites=sites)
  script, plan = small.script("dilocox", 8, sync_interval=6)
  work = small.work(one, speeds=rng.uniform(0.3, 2, 8))
  by_formula, by_events = both(one, script, plan, work)
  assert_agree(by_formula, by_events)


def test_replicas_of_one_site_share_its_link_also_out_of_step():
  one = small.cluster(2)
  shared = dataclasses.replace(one, placement=(0, 1, 0, 1))
  script, plan = small.script("diloco", 4, sync_interval=10)
  work = small.work(shared, speeds=[1.0, 0.5, 0.8, 0.7])
  link_costs = small.link_costs(shared)
  by_events = simulate(link_costs, work, script.ops(plan))
  by_formula = run_time(link_costs, work, script.ops(plan))
  # The formula divides a link even while only one flow is on it.
  assert by_events.total_s <= by_formula.total_s * (1 + 1e-9)


def test_a_collective_nobody_knows_is_refused():
  one = small.cluster(2)
  ops = [Launch(("x", 0, 0, 0), (Collective("gossip", 8),))]
  with pytest.raises(ValueError, match="kind='gossip' is not a collective"):
    lower(small.link_costs(one), small.work(one), ops)


def test_loss_on_the_way_slows_events_as_it_slows_formulas():
  lossy, clean = (
    small.cluster(3, bps=1e10, rtt_s=0.1, loss=loss) for loss in (1e-3, 0.0)
  )
  script, plan = small.script("diloco", 3, sync_interval=10)
  by_formula, by_events = both(lossy, script, plan, small.work(lossy))
  assert_agree(by_formula, by_events)
  assert by_events.total_s > engine(clean, script, plan).total_s
