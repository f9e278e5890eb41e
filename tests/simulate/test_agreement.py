"""Formulas and events: two ways to one cost."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.sites import Jitter, SiteOutage
from dilocox_jax.simulate.transfer import GLOO, NCCL
from tests.oracles.events import simulate
from tests.simulate import small

METHODS = [
  ("diloco", {"sync_interval": 10}),
  ("diloco", {"sync_interval": 7}),
  ("dilocox", {"sync_interval": 8}),
  ("eager", {"sync_interval": 5, "num_fragments": 3}),
  ("streaming_diloco", {"sync_interval": 9, "overlap_steps": 4}),
  ("delayed", {"sync_interval": 4, "num_fragments": 2, "overlap_steps": 6}),
  ("delayed", {"sync_interval": 3, "overlap_steps": 7}),
  (
    "delayed",
    {"sync_interval": 6, "num_fragments": 3, "fragment_order": "sequential"},
  ),
  ("overlap_loco", {"sync_interval": 6, "num_fragments": 6}),
  ("allreduce", {"total_steps": 9}),
  ("diloco", {"warm_start": "single", "warm_start_steps": 12}),
  ("dilocox", {"warm_start": "data_parallel", "warm_start_steps": 5}),
]
# Drawn absences, so that any number of replicas will do.
APART = {"absence_rate": 0.4, "seed": 3}
METHODS += [
  ("diloco", {"sync_interval": 4, "membership": APART}),
  (
    "delayed",
    {
      "sync_interval": 6,
      "num_fragments": 2,
      "overlap_steps": 9,
      "membership": APART,
    },
  ),
]
FIELDS = (
  "busy_until_s",
  "end_s",
  "compute_s",
  "codec_s",
  "exposed_s",
  "exchange_s",
)


def both(one, script, plan, work, transport=small.PLAIN):
  link_costs = small.link_costs(one, transport)
  by_formula = run_time(link_costs, work, script.ops(plan))
  return by_formula, simulate(link_costs, work, script.ops(plan))


def assert_agree(by_formula, by_events, tolerance=1e-9):
  for field in FIELDS:
    np.testing.assert_allclose(
      getattr(by_events, field),
      getattr(by_formula, field),
      rtol=tolerance,
      atol=tolerance * by_formula.total_s,
      err_msg=field,
    )
  assert by_events.num_steps == by_formula.num_steps
  assert by_events.sent_bytes == by_formula.sent_bytes


@settings(max_examples=60, deadline=None)
@given(
  method=st.sampled_from(METHODS),
  num_replicas=st.integers(1, 6),
  codec=st.sampled_from(sorted(small.CODECS)),
  bps=st.floats(1e6, 1e11),
  rtt_s=st.floats(0, 0.3),
  loss=st.sampled_from([0.0, 1e-4]),
  step_s=st.floats(1e-3, 1.0),
  codec_s=st.sampled_from([0.0, 0.02]),
  transport=st.sampled_from([small.PLAIN, NCCL, GLOO]),
)
def test_formulas_and_events_agree_on_every_homogeneous_case(
  method, num_replicas, codec, bps, rtt_s, loss, step_s, codec_s, transport
):
  name, changes = method
  # A copy leaves replicas out of step, and codecs of few bits scatter.
  is_copied = "membership" in changes or changes.get("warm_start") == "single"
  codec = "fp32" if is_copied else codec
  one = small.cluster(num_replicas, bps=bps, rtt_s=rtt_s, loss=loss)
  script, plan = small.script(name, num_replicas, codec, **changes)
  work = small.work(one, step_s, codec_s)
  by_formula, by_events = both(one, script, plan, work, transport)
  assert_agree(by_formula, by_events)


@settings(max_examples=30, deadline=None)
@given(
  method=st.sampled_from(METHODS),
  speeds=st.lists(st.floats(0.2, 2), min_size=2, max_size=6),
  sigma=st.sampled_from([0.0, 0.3]),
  seed=st.integers(0, 99),
  transport=st.sampled_from([small.PLAIN, NCCL]),
)
def test_they_agree_on_uneven_replicas_whose_links_nobody_shares(
  method, speeds, sigma, seed, transport
):
  name, changes = method
  one = small.cluster(len(speeds), Jitter(sigma, sigma, seed))
  script, plan = small.script(name, len(speeds), **changes)
  work = small.work(one, speeds=speeds)
  by_formula, by_events = both(one, script, plan, work, transport)
  assert_agree(by_formula, by_events)


@settings(max_examples=30, deadline=None)
@given(
  rates_bps=st.lists(st.floats(1e7, 1e8), min_size=3, max_size=6),
  codec=st.sampled_from(["int4", "int8", "rank 2"]),
)
def test_an_all_to_all_over_uneven_links_takes_no_less_than_the_formula(
  rates_bps, codec
):
  one = small.cluster(len(rates_bps))
  sites = tuple(
    dataclasses.replace(site, link=small.link(bps))
    for site, bps in zip(one.sites, rates_bps, strict=True)
  )
  script, plan = small.script("diloco", len(rates_bps), codec, sync_interval=10)
  one = dataclasses.replace(one, sites=sites)
  by_formula, by_events = both(one, script, plan, small.work(one))
  ratio = by_events.total_s / by_formula.total_s
  assert 1 - 1e-9 < ratio < 1.12


@pytest.mark.parametrize("transport", [small.PLAIN, NCCL])
def test_they_agree_on_outages(transport):
  """A link is down in the middle of a message, and again before another."""
  one = small.cluster(2, bps=1e7)
  script, plan = small.script("diloco", 2, sync_interval=10)
  work = small.work(one)
  whole, _ = both(one, script, plan, work)
  outages = (
    SiteOutage("site 0", 0.55, 1.0),
    SiteOutage("site 0", 0.9, 1.5),
    SiteOutage("site 1", 3.0, 3.2),
  )
  by_formula, by_events = both(
    dataclasses.replace(one, outages=outages), script, plan, work, transport
  )
  assert_agree(by_formula, by_events)
  assert by_formula.total_s > whole.total_s + 0.9


def test_both_refuse_an_outage_that_never_ends():
  outage = SiteOutage("site 1", 0.1, np.inf)
  one = dataclasses.replace(small.cluster(2), outages=(outage,))
  script, plan = small.script("diloco", 2, sync_interval=10)
  costs, work = small.link_costs(one), small.work(one)
  with pytest.raises(ValueError, match="can never finish"):
    run_time(costs, work, script.ops(plan))
  with pytest.raises(ValueError, match="can never finish"):
    simulate(costs, work, script.ops(plan))
