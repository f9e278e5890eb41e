import dataclasses

import pytest

from dilocox_jax.api.simulation_setup import Options, set_up
from dilocox_jax.config import from_mapping
from dilocox_jax.simulate.analytic import run_time
from dilocox_jax.simulate.link_costs import LinkCosts
from experiments.sweeps.simulated_time import (
  SLACK,
  PlannedTime,
  fitting_interval,
  overlap_steps,
  rounds_from,
)
from experiments.sweeps.sweep_spec import SweepClock

SLOW = SweepClock("100mbit", 0.25)
FAST = SweepClock("100mbit", 0.03)


def waiting(made):
  """A run on the cluster with the messages that sweeps were planned with."""
  setup = set_up(made, SLOW.cluster, Options(step_s=SLOW.step_s))
  costs = LinkCosts(setup.link_costs.cluster, SLOW.transport)
  return dataclasses.replace(setup, link_costs=costs)


def config(method, **sync):
  return from_mapping(
    {"total_steps": 60, "inner": {"warmup_steps": 2}}
    | {"sync": {"method": method, **sync}, "codec": {"name": "float32"}}
  )


@pytest.mark.parametrize(
  "exchange_s, step_s, steps",
  [(0.001, 1.0, 1), (1.0, 1.0, 1), (1.001, 1.0, 2), (0.3, 0.1, 3)],
)
def test_tau_is_the_fewest_steps_that_cover_the_transfer(
  exchange_s, step_s, steps
):
  assert overlap_steps(exchange_s, step_s) == steps


@pytest.mark.parametrize(
  "least, total_steps, interval",
  [
    *((10, 2000, 10), (34, 2000, 40), (2, 2000, 2), (34, 1999, 34)),
    *((5, 2000, 5), (17, 2000, 20), (1, 2000, 1), (17, 1999, 17)),
  ],
)
def test_h_divides_the_run_if_a_divisor_is_near(least, total_steps, interval):
  assert fitting_interval(least, total_steps) == interval


def test_behind_tau_from_the_transfer_everything_hides():
  timed = PlannedTime(config("diloco", sync_interval=30), SLOW)
  tau = overlap_steps(timed.exchange_s([0]), timed.step_s)
  assert tau > 1

  def waits(steps):
    made = config("delayed", overlap_steps=steps, sync_interval=30)
    setup = waiting(made)
    plan = dataclasses.replace(setup.plan, total_steps=59 + steps)
    ops = setup.script.ops(plan, stop=59)
    return run_time(setup.link_costs, setup.work, ops).exposed_s.max()

  assert waits(tau) == 0 and waits(tau - 1) > 0


def test_fragments_in_turn_get_rounds_that_hide_the_largest_of_them():
  shape = {"num_fragments": 2, "sync_interval": 4}
  made = config("overlap_loco", **shape)
  timed = PlannedTime(made, SLOW)
  longest_s = max(timed.exchange_s([fragment]) for fragment in (0, 1))
  window = overlap_steps(longest_s, timed.step_s)
  assert longest_s < timed.exchange_s([0, 1])
  assert rounds_from(SLOW, made) == {"sync.sync_interval": 2 * window}


@pytest.mark.parametrize(
  "made",
  [
    config("allreduce"),
    config("diloco", sync_interval=25),
    config("dilocox", sync_interval=20),
    config("streaming_diloco", sync_interval=20),
    config("diloco", warm_start="data_parallel", warm_start_steps=10),
  ],
)
def test_a_run_ends_where_the_simulator_ends_it_flush_included(made):
  setup = waiting(made)
  expected = run_time(
    setup.link_costs, setup.work, setup.script.ops(setup.plan)
  )
  times = PlannedTime(made, SLOW).times()
  assert times.end_s == expected.now_s
  assert times.utilisation == expected.utilisation
  assert max(times.at_s) == 60 and times.at_s[60] <= times.end_s
  assert list(times.at_s.values()) == sorted(times.at_s.values())
  (first, *_) = times.at_s
  assert times.after(first) == times.after(first + 1) == times.at_s[first]
  assert times.after(first - 1) == 0


@pytest.mark.parametrize("method", ["allreduce", "diloco", "dilocox"])
def test_affordable_steps_fit_and_one_more_step_does_not(method):
  made = config(method)
  timed = PlannedTime(made, SLOW)
  budget_s = 0.69 * timed.times().end_s
  steps = timed.affordable_steps(budget_s, 60)
  assert 0 < steps < 60

  def end_s(total_steps):
    shorter = dataclasses.replace(made, total_steps=total_steps)
    return PlannedTime(shorter, SLOW).times().end_s

  assert end_s(steps) <= (1 + SLACK) * budget_s < end_s(steps + 1)


def test_a_round_that_is_cut_is_paid_for():
  """A whole one fits in the end, but hardly any step of the next."""
  made = config("diloco", sync_interval=25)
  timed = PlannedTime(made, SLOW)

  def affords(total_steps):
    shorter = dataclasses.replace(made, total_steps=total_steps)
    end_s = PlannedTime(shorter, SLOW).times().end_s
    return timed.affordable_steps(end_s, 60)

  assert [affords(n) for n in (25, 31, 50, 60)] == [25, 31, 50, 60]
  assert affords(26) == 26 and affords(24) == 0


def test_ones_own_time_affords_ones_own_steps_and_none_affords_none():
  made = config("diloco", sync_interval=25)  # Does not divide 60.
  timed = PlannedTime(made, SLOW)
  assert timed.affordable_steps(timed.times().end_s, 60) == 60
  assert timed.affordable_steps(1e-3, 60) == 0


@pytest.mark.parametrize(
  "sync",
  [
    {"method": "delayed", "sync_interval": 20, "overlap_steps": 13},
    {"method": "dilocox", "sync_interval": 12},
    {"method": "diloco", "sync_interval": 15},
  ],
)
def test_no_longer_run_of_as_many_whole_rounds_fits(sync):
  """With overlap a longer run may be shorter in time: all are tried."""
  made = config(**sync)
  timed = PlannedTime(made, FAST)
  interval = made.sync.named.schedule.sync_interval

  def end_s(total_steps):
    shorter = dataclasses.replace(made, total_steps=total_steps)
    return PlannedTime(shorter, FAST).times().end_s

  ends_s = {steps: end_s(steps) for steps in range(interval, 61)}
  for budget_s in sorted(ends_s.values()):
    found = timed.affordable_steps(budget_s, 60)
    fitting = [n for n, s in ends_s.items() if s <= (1 + SLACK) * budget_s]
    whole = max(n for n in fitting if not n % interval)
    last = [n for n in fitting if whole <= n < whole + interval]
    assert found in (60, max(last)), budget_s
