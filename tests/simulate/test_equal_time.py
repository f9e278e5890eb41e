"""Growing rounds and starts that a run has time for."""

import dataclasses
import re

import pytest

from dilocox_jax.api.growing_plans import growing_plans
from dilocox_jax.config import RunConfig, from_mapping, to_plan
from dilocox_jax.simulate.equal_time import (
  constant_rounds,
  schedules_within,
)
from tests.experiments import programs
from tests.simulate import small

DILOCO = {"sync_interval": 8, "total_steps": 64}


def found(most_exchanges, method="diloco", **settings):
  """Schedules with the time of a number of exchanges, after constant rounds."""
  script, plan = small.script(method, **DILOCO | settings)
  one = small.cluster(script.traffic.num_replicas, bps=1e7)
  run = small.link_costs(one), small.work(one, 0.05), script, plan
  constant = constant_rounds(*run)
  exchange_s = constant.outcome.exposed_s[0] / 8

  def method_of(interval, first, per_doubling):
    given = {"sync_interval": interval, "total_steps": 64}
    if first is not None:
      given |= {"first_interval": first, "steps_per_doubling": per_doubling}
    _, other = small.script(method, **given)
    return other.method

  most_s = 64 * 0.05 + most_exchanges * exchange_s
  return constant, list(schedules_within(most_s, *run, method_of))


def num_exchanges(schedule, constant):
  """How many exchanges a run sends, from its bytes."""
  return 8 * schedule.outcome.sent_bytes / constant.outcome.sent_bytes


def test_schedules_take_no_more_exchanges_than_the_time_allows():
  constant, schedules = found(8)
  assert constant.sync_interval == 8
  assert constant.outcome.total_s == pytest.approx(
    64 * 0.05 + 8 * (constant.outcome.exposed_s[0] / 8)
  )
  # Rounds of at most 8 steps that begin shorter take longer.
  lengths = {(each.first_interval, each.sync_interval) for each in schedules}
  assert {(1, 16), (4, 16), (2, 32), (None, 16), (None, 32)} <= lengths
  assert all(interval > 8 for _, interval in lengths)
  for each in schedules:
    assert num_exchanges(each, constant) <= 8
    assert each.outcome.total_s <= constant.outcome.total_s * (1 + 1e-9)
  # 8 exchanges: 5 steps with one each, and 3 of the 59 steps that are left, in
  # rounds of 16, 16, 16 and 11 steps: that is one too many.
  (start,) = [
    each
    for each in schedules
    if each.first_interval is None and each.sync_interval == 16
  ]
  assert start.warm_start_steps + -(-(64 - start.warm_start_steps) // 16) == 8


def test_more_time_allows_slower_growth():
  _, fewer = found(8)
  constant, more = found(16)
  assert {(4, 8)} <= {
    (each.first_interval, each.sync_interval) for each in more
  }
  of_fewer, of_more = (
    next(
      each
      for each in schedules
      if each.first_interval == 4 and each.sync_interval == 16
    )
    for schedules in (fewer, more)
  )
  slower, faster = of_more.steps_per_doubling, of_fewer.steps_per_doubling
  assert slower and faster and slower > faster
  assert all(num_exchanges(each, constant) <= 16 for each in more)
  assert found(1)[1] == []  # Two rounds of 32 steps are the fewest.


@pytest.mark.parametrize(
  ("method", "settings", "message"),
  [
    ("allreduce", {}, "has no rounds that could grow"),
    ("diloco", {"warm_start_steps": 8}, "leave out sync.first_interval"),
    (
      "diloco",
      {"first_interval": 4, "steps_per_doubling": 8},
      "leave out sync.first_interval",
    ),
    ("diloco", {"membership": {"absences": ((1, 2, 3),)}}, "leave out member"),
  ],
)
def test_what_cannot_grow_is_refused(method, settings, message):
  with pytest.raises(ValueError, match=message):
    found(8, method, **settings)


def config_of(**changes):
  return from_mapping(
    {
      "sync.method": "diloco",
      "sync.sync_interval": 8,
      "total_steps": 128,
      "model.preset": "nano",
      **changes,
    }
  )


def test_plans_have_configs_with_the_bytes_that_they_state():
  config = config_of()
  constant, *proposals = growing_plans(config, "1gbit")
  assert constant.config == config and proposals
  for plan in proposals:
    assert plan.total_s <= constant.total_s * (1 + 1e-9)
    run_plan = to_plan.run_plan(plan.config)
    traffic = to_plan.traffic(plan.config)
    total = sum(map(traffic.segment_bytes, run_plan.segments()))
    total += traffic.flush_bytes(run_plan.schedule_step(128))
    assert plan.sent_bytes == total
  assert any(plan.config.sync.warm_start_steps for plan in proposals)
  assert any(plan.config.sync.first_interval for plan in proposals)


def test_a_utilization_sets_the_time():
  config = config_of()
  constant, *_ = growing_plans(config, "1gbit")
  least = constant.utilization / 2
  _, *proposals = growing_plans(config, "1gbit", utilization=least)
  assert proposals
  assert all(plan.utilization >= least * (1 - 1e-6) for plan in proposals)
  fastest = min(plan.utilization for plan in proposals)
  assert fastest < constant.utilization * 0.8
  with pytest.raises(ValueError, match="utilization=2 must be above 0"):
    growing_plans(config, "1gbit", utilization=2)


def test_fragments_and_delay_stay_those_of_the_method():
  overlap_loco = {"sync.method": "overlap_loco", "sync.sync_interval": 32}
  config = config_of(**overlap_loco)
  constant, *_ = growing_plans(config, "1gbit")
  least = constant.utilization / 2
  _, *proposals = growing_plans(config, "1gbit", utilization=least)
  schedules = [plan.config.sync.named.schedule for plan in proposals]
  assert {schedule.num_fragments for schedule in schedules} == {16}
  growing = [each for each in schedules if not each.is_regular]
  # Shorter rounds than of 16 steps could not send 16 fragments.
  assert {each.round_at(0)[1] for each in growing} == {16}


PROPOSALS = (
  "simulate",
  "--methods=growing",
  "--config.model.preset=nano",
  "--config.total_steps=64",
  "--config.sync.sync_interval=8",
)


def test_simulate_prints_the_proposals():
  done = programs.run(*PROPOSALS)
  assert done.returncode == 0, done.stderr
  assert "rounds that take no more time" in done.stdout
  assert re.search(r"4 to 16, doubling every \d+ +0 ", done.stdout)
  assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("flag", ["--workdir=x", "--memory='80 GB'"])
def test_a_flag_that_proposals_do_not_read_is_refused(flag):
  done = programs.run("simulate", "--methods=growing", flag)
  assert done.returncode == 2
  assert "needs --methods=own or all" in done.one_line


def test_replicas_that_meet_in_a_mailbox_get_no_data_parallel_start():
  done = programs.run(*PROPOSALS, "--transport=mailbox")
  assert done.returncode == 0, done.stderr
  assert "doubling every" in done.stdout


def test_a_growing_config_is_refused_in_one_line():
  done = programs.run(
    "simulate",
    "--methods=growing",
    "--config.sync.method=allreduce",
  )
  assert done.returncode == 2
  assert done.stderr.count("\n") == 1 and "take diloco" in done.stderr


def test_the_default_config_can_be_asked_for_its_proposals():
  config = dataclasses.replace(RunConfig(), total_steps=60)
  assert growing_plans(config, "1gbit")[0].config == config


def test_a_run_of_one_step_has_no_proposals():
  config = config_of(**{"total_steps": 1, "sync.sync_interval": 1})
  (constant,) = growing_plans(config, "1gbit")
  assert constant.config == config
