"""Time of a step alone, and with the exchanges of a long run."""

import dataclasses

import numpy as np
import pytest

from dilocox_jax.plan.pipeline import Pipeline
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.steps import (
  stated_seconds,
  steady_state,
  step_seconds,
)
from tests.simulate import small


def devices(**changes):
  """Two sites of four devices that achieve 2 TFLOP/s; the second is slow."""
  first, second = (
    dataclasses.replace(site, num_devices=4, peak_flops=1e12, **changes)
    for site in small.cluster(2).sites
  )
  sites = [
    dataclasses.replace(x, achieved_fraction=0.5) for x in (first, second)
  ]
  sites[1] = dataclasses.replace(sites[1], speed=0.25)
  return dataclasses.replace(small.cluster(2), sites=tuple(sites))


@pytest.mark.parametrize(
  "settings, seconds, bubble",
  [
    ({}, 4.0, 0.0),
    ({"num_used": 2}, 8.0, 0.0),
    # (p - 1) / m of the ideal step is added.
    ({"pipeline": Pipeline("gpipe", 4, 8)}, 4.0 * (1 + 3 / 8), 3 / 11),
    ({"pipeline": Pipeline("1f1b", 4, 8)}, 4.0 * (1 + 3 / 8), 3 / 11),
  ],
)
def test_a_step_is_its_operations_over_what_the_devices_achieve(
  settings, seconds, bubble
):
  found, idle = step_seconds(devices(), 8e12, **settings)
  np.testing.assert_allclose(found, [seconds, 4 * seconds])
  assert idle == pytest.approx(bubble)


def test_activations_on_the_way_lengthen_a_step():
  args = devices(intra_bps=8e9), 8e12, Pipeline("1f1b", 4, 8)
  longer = step_seconds(*args, hop_bytes=1e9)[0] - step_seconds(*args)[0]
  assert np.all(longer >= 6 * 1.0)  # There and back over three hops.


def test_devices_wait_for_bytes_inside_a_replica():
  one = devices(intra_bps=8e9)
  found, _ = step_seconds(one, 8e12, inner_bytes=1e9)
  np.testing.assert_allclose(found, [4.0 + 1.0, 16.0 + 1.0])


def test_a_stated_step_takes_as_long_as_the_speed_of_its_site_says():
  np.testing.assert_allclose(stated_seconds(devices(), 2.0), [2.0, 8.0])


def found(script, plan, codec_s=0.0, speeds=None):
  one = small.cluster(script.traffic.num_replicas, bps=1e7)
  costs = small.link_costs(one)
  work = small.work(one, 0.05, codec_s, speeds)
  return costs, work, steady_state(costs, work, script, plan)


@pytest.mark.parametrize("name, changes", small.SCHEDULES)
def test_a_longer_run_costs_as_much_more(name, changes):
  script, plan = small.script(name, **changes)
  costs, work, rounds = found(script, plan, codec_s=0.01)
  length = plan.method.schedule.sync_interval
  if plan.method.exchanged == "gradient":
    length = plan.steps_per_dispatch
  first = plan.warm_start_steps + 20 * length
  more = 12 * length
  begun, done = (
    run_time(costs, work, small.ops_up_to(script, plan, stop))
    for stop in (first, first + more)
  )
  assert rounds.step_s * more == pytest.approx(done.now_s - begun.now_s)
  sent = done.sent_bytes - begun.sent_bytes
  assert rounds.sent_bytes * more == pytest.approx(sent)
  exposed = float((done.exposed_s - begun.exposed_s).mean())
  assert rounds.exposed_s * more == pytest.approx(exposed, abs=1e-9)


def test_the_hiding_interval_is_the_least_that_hides():
  rounds = found(*small.script("dilocox", sync_interval=50))[2]
  least = rounds.hiding_interval(50)
  assert 1 < least < 50
  for interval, is_hidden in ((least, True), (least - 1, False)):
    waits = found(*small.script("dilocox", sync_interval=interval))[2].exposed_s
    assert (waits < 1e-9) is is_hidden


def test_waiting_for_a_slower_replica_is_no_busy_line():
  script, plan = small.script("diloco", sync_interval=10)
  equal = found(script, plan)[2]
  uneven = found(script, plan, speeds=(1.0, 0.5))[2]
  assert uneven.step_s > equal.step_s
  assert uneven.exchange_s == pytest.approx(equal.exchange_s)
  # Steps of the slower replica hide as much in half as many.
  half = -(-equal.hiding_interval(10) // 2)
  assert uneven.hiding_interval(10) == half


@pytest.mark.parametrize(
  "members, a_step",
  [
    (None, 4),
    ({"inner_steps": (10, 5, 10, 5)}, 3),
    ({"absence_rate": 0.25, "seed": 5}, pytest.approx(3, rel=0.05)),
  ],
)
def test_steps_of_all_replicas_are_those_that_they_take(members, a_step):
  args = small.script("diloco", 4, sync_interval=10, membership=members)
  assert found(*args)[2].replica_steps == a_step


def test_what_has_its_own_time_in_a_run_is_no_steady_state():
  away = {"absences": ((1, 0, 11),)}
  args = small.script("diloco", 4, sync_interval=10, membership=away)
  expected = found(*small.script("diloco", 4, sync_interval=10))[2]
  assert found(*args)[2] == expected
