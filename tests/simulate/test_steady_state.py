"""Rounds in the middle of a run, against the difference of two long runs."""

import dataclasses

import pytest

from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.sites import SiteOutage
from dilocox_jax.simulate.steady_state import steady_state
from tests.simulate import small
from tests.simulate.test_agreement import METHODS


def found(script, plan, step_s=0.05, codec_s=0.0):
  one = small.cluster(bps=1e7)
  costs, work = small.link_costs(one), small.work(one, step_s, codec_s)
  return costs, work, steady_state(costs, work, script, plan)


# Rounds with absences differ, so they have no steady state.
@pytest.mark.parametrize(
  "method, settings", [one for one in METHODS if "membership" not in one[1]]
)
def test_a_longer_run_costs_as_much_more(method, settings):
  script, plan = small.script(method, **settings)
  costs, work, rounds = found(script, plan, codec_s=0.01)
  is_local = plan.method.exchanged == "pseudo_gradient"
  interval = plan.method.schedule.sync_interval
  length = interval if is_local else plan.steps_per_dispatch
  first, more = plan.warm_start_steps + 40 * length, 12 * length
  times = []
  for total_steps in (first, first + more):
    ops = script.ops(dataclasses.replace(plan, total_steps=10**6), total_steps)
    times.append(run_time(costs, work, ops))
  begun, done = times
  assert rounds.step_s * more == pytest.approx(done.now_s - begun.now_s)
  sent = done.sent_bytes - begun.sent_bytes
  assert rounds.sent_bytes * more == pytest.approx(sent)
  exposed = float((done.exposed_s - begun.exposed_s).mean())
  assert rounds.exposed_s * more == pytest.approx(exposed, abs=1e-9)


def test_a_method_that_waits_takes_its_steps_and_its_exchanges():
  script, plan = small.script("diloco", sync_interval=10)
  _, _, rounds = found(script, plan)
  assert rounds.step_s == pytest.approx(0.05 + rounds.exchange_s)
  assert rounds.utilisation == pytest.approx(0.05 / rounds.step_s)


def test_the_hiding_interval_is_the_least_that_hides():
  script, plan = small.script("dilocox", sync_interval=50)
  _, _, rounds = found(script, plan)
  least = rounds.hiding_interval(50)
  assert 1 < least < 50
  for interval, is_hidden in ((least, True), (least - 1, False)):
    script, plan = small.script("dilocox", sync_interval=interval)
    waits = found(script, plan)[2].exposed_s
    assert (waits < 1e-9) is is_hidden


@pytest.mark.parametrize("steps, a_step", [((), 2.0), ((10, 5), 1.5)])
def test_steps_of_all_replicas_are_those_that_they_take(steps, a_step):
  members = {"inner_steps": steps} if steps else None
  script, plan = small.script("diloco", sync_interval=10, membership=members)
  assert found(script, plan)[2].replica_steps == a_step


def test_what_has_its_own_time_in_a_run_is_no_steady_state():
  script, plan = small.script("diloco", 4, sync_interval=10)
  one = small.cluster(4, bps=1e7)
  work = small.work(one)
  expected = steady_state(small.link_costs(one), work, script, plan)
  away, absent = small.script(
    "diloco", 4, sync_interval=10, membership={"absences": ((1, 0, 11),)}
  )
  down = dataclasses.replace(one, outages=(SiteOutage("site 0", 2.0, 9.0),))
  found = steady_state(small.link_costs(down), work, away, absent)
  assert found == expected


def test_absences_by_chance_are_averaged():
  members = {"absence_rate": 0.25, "seed": 5}
  script, plan = small.script("diloco", 4, sync_interval=10, membership=members)
  one = small.cluster(4)
  found = steady_state(small.link_costs(one), small.work(one), script, plan)
  assert found.replica_steps == pytest.approx(3, rel=0.05)


def test_waiting_for_a_slower_replica_is_no_busy_line():
  script, plan = small.script("diloco", sync_interval=10)
  one = small.cluster(bps=1e7)
  costs = small.link_costs(one)
  equal, uneven = (
    steady_state(costs, small.work(one, 0.05, speeds=speeds), script, plan)
    for speeds in (None, (1.0, 0.5))
  )
  assert uneven.step_s > equal.step_s
  assert uneven.exchange_s == pytest.approx(equal.exchange_s)
  # Steps of the slower replica hide as much in half as many.
  half = -(-equal.hiding_interval(10) // 2)
  assert uneven.hiding_interval(10) == half
