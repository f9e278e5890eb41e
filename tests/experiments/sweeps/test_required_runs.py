import collections
import functools
import math

import pytest

from experiments.sweeps import method_list
from experiments.sweeps.required_runs import (
  TASKS,
  NotTunedError,
  RequiredRuns,
)
from experiments.sweeps.simulated_time import fitting_interval
from experiments.sweeps.sweep_spec import sweep
from tests.experiments.sweeps import fakes as sweeps


@functools.cache
def every():
  """All planned runs by task, with made losses."""
  return {s: sweeps.runs_of(s, sweeps.required()) for s in TASKS}


def test_every_method_gets_as_many_tuning_runs_of_the_same_length():
  plan, found = sweeps.required(), every()
  tuning = [*found["tune_inner"], *found["tune_outer"]]
  counts = collections.Counter(run.name for run in tuning)
  assert set(counts) == set(sweeps.NAMES)
  assert set(counts.values()) == {plan.sweep.tuning_runs} == {8}
  assert {run.config.total_steps for run in tuning} == {12}
  rates = collections.defaultdict(list)
  for run in found["tune_inner"]:
    rates[run.name].append(run.config.inner.learning_rate)
  assert set(map(tuple, rates.values())) == {(1e-3, 3e-3, 9e-3)}
  settings = {(run.name, str(run.config.to_mapping())) for run in tuning}
  assert len(settings) == len(tuning)


def test_no_result_is_on_the_seed_that_was_tuned_on():
  found = every()
  tuning = {r.seed for s in TASKS[:2] for r in found[s]}
  results = {r.seed for s in TASKS[2:] for r in found[s]}
  assert tuning == {1000} and results == {0, 1}


def test_every_schedule_ends_at_the_runs_own_last_step():
  found = every()
  assert {r.config.total_steps for r in found["results"]} == {48}
  assert all(run.ends_round for run in found["results"])
  for run in (*found["results"], *found["equal_time"]):
    assert run.config.inner.warmup_steps <= run.config.total_steps // 4
  # On a slow link AllReduce gets fewer steps, and its schedule is as short.
  short = {r.config.total_steps for r in found["equal_time"]}
  assert len(short) > 1


def test_results_run_with_what_tuned_best():
  plan = sweeps.required()
  diloco = plan.sweep.method("diloco")
  tuned = plan.tuned(diloco)
  assert tuned.changed == {
    "inner.learning_rate": 3e-3,
    "outer.learning_rate": 0.7,
    "outer.momentum": 0.3,
  }
  assert tuned.edges == ()
  for run in plan.results(diloco):
    assert run.config.outer.momentum == 0.3
    assert run.config.inner.learning_rate == 3e-3
    assert run.config.inner.warmup_steps == 2
    assert run.config.evaluation.interval_steps == 12


def test_a_method_without_an_outer_optimizer_tunes_what_it_has():
  plan = sweeps.required()
  allreduce = plan.sweep.method("allreduce")
  runs = plan.tune_outer(allreduce)
  assert [
    (run.config.inner.learning_rate, run.config.inner.warmup_steps)
    for run in runs
  ] == [
    (0.00225, 2),
    (0.0039, 2),
    (3e-3, 1),
    (3e-3, 3),
    (0.0039, 3),
  ]  # 3: a quarter of 12.

  assert plan.tuned(allreduce).changed == {
    "inner.learning_rate": 3e-3,
    "inner.warmup_steps": 1,
  }


@pytest.mark.parametrize(
  "best, edges",
  [
    ((9e-3, 0.7, 0.3), ("inner rate 0.009, the highest",)),
    ((3e-3, 0.7, 0.9), ("outer step 7, the highest",)),
    ((3e-3, 0.4, 0.0), ("outer step 0.4, the lowest",)),
    ((3e-3, 1.0, 0.0), ()),  # Long steps come of momentum too.
  ],
)
def test_a_best_value_at_an_end_of_its_grid_is_named(best, edges):

  def away(run):
    inner, outer = run.config.inner, run.config.outer
    values = (inner.learning_rate, outer.learning_rate, outer.momentum)
    return sum(abs(a - b) for a, b in zip(values, best, strict=True))

  plan = sweeps.required(away)
  assert plan.tuned(plan.sweep.method("diloco")).edges == edges


@pytest.mark.parametrize(
  "rate, warmup, edges",
  [
    (3e-3, 1, ("warm-up 1, the lowest",)),
    (3e-3, 2, ()),
    # The corner of what is tried at the best rate of the grid.
    (
      3.9e-3,
      3,
      ("finer inner rate 0.0039, the highest", "warm-up 3, the highest"),
    ),
  ],
)
def test_without_an_outer_optimizer_a_finer_rate_and_a_warm_up_have_ends(
  rate, warmup, edges
):

  def away(run):
    inner = run.config.inner
    return abs(inner.learning_rate - rate) + abs(inner.warmup_steps - warmup)

  plan = sweeps.required(away)
  assert plan.tuned(plan.sweep.method("allreduce")).edges == edges


def test_results_with_given_settings_do_not_wait_for_the_rest_of_tuning():
  given = sweeps.values()
  rate = {"inner.learning_rate": 2e-3}
  given["methods"][0] |= {"given": rate}

  def rates_only(run):
    return sweeps.loss_of(run) if run.task == "tune_inner" else None

  plan = RequiredRuns(sweep(given), rates_only)
  allreduce = plan.sweep.method("allreduce")
  assert len(plan.tune_inner(allreduce)) == 3
  assert plan.tune_outer(allreduce) == []
  for run in plan.results(allreduce):
    assert run.config.inner.learning_rate == 2e-3


def test_a_tuning_run_that_diverged_never_wins_and_counts():

  def diverges(run):
    high = run.config.inner.learning_rate > 2e-3
    return math.nan if high else sweeps.loss_of(run)

  plan = sweeps.required(diverges)
  diloco = plan.sweep.method("diloco")
  tuned = plan.tuned(diloco)
  assert tuned.changed["inner.learning_rate"] == 1e-3
  with pytest.raises(NotTunedError, match="every tuning run of 'diloco'"):
    sweeps.required(lambda run: math.nan).tuned(diloco)


def test_results_wait_for_tuning():
  with pytest.raises(NotTunedError, match="--task=tune_inner"):
    sweeps.runs_of("results", sweeps.required(lambda run: None))


def test_a_clock_that_does_not_fit_is_found_before_the_first_run():
  sweeps.required().check()
  slow = [*sweeps.clocks("1gbit", 0.3), {"name": "no", "cluster": "moon"}]
  with pytest.raises(ValueError, match="moon"):
    sweeps.required(clusters=slow).check()


def test_how_many_rounds_tuning_has_seen_is_known():
  plan = sweeps.required()
  rounds = {m.name: plan.tuning_rounds(m) for m in plan.sweep.methods}
  assert rounds["allreduce"] == 12 and rounds["diloco"] == 2


def test_only_ours_depends_on_the_link():
  def found(cluster):
    plan = sweeps.required(clusters=sweeps.clocks(cluster, 0.02))
    return {
      (run.name, run.seed): run.config
      for run in sweeps.runs_of("results", plan)
    }

  slow, fast = found("100mbit"), found("infinite")
  differ = {key[0] for key in slow if slow[key] != fast[key]}
  assert slow.keys() == fast.keys() and differ == {"ours_1gbit"}


def test_equal_time_leaves_out_what_gets_hardly_a_step():
  plan = sweeps.required()
  allreduce = plan.sweep.method("allreduce")
  assert plan.steps_at(allreduce, "107b") < 20
  assert plan.equal_time(allreduce, "107b") == []
  reference = plan.sweep.method("dilocox_continue")
  runs = plan.equal_time(reference, "107b")
  results = plan.results(reference)
  assert [r.config for r in runs] == [r.config for r in results]


def test_only_the_named_methods_are_trained_at_equal_time():
  named = ("dilocox_continue", "allreduce")
  contest = {"clock": "1gbit", "reference": named[0], "methods": named}
  plan = sweeps.required(equal_time=[contest])
  runs = sweeps.runs_of("equal_time", plan)
  assert {run.name for run in runs} == set(named)


def test_a_warm_start_is_as_much_shorter_as_a_tuning_run():
  given = sweeps.values()
  given["methods"][1] |= method_list.warm(12)
  plan = RequiredRuns(sweep(given), sweeps.loss_of)
  diloco = plan.sweep.method("diloco")
  tuning = plan.tune_outer(diloco)
  results = plan.results(diloco)
  assert {r.config.sync.warm_start_steps for r in tuning} == {3}
  assert {r.config.sync.warm_start_steps for r in results} == {12}
  assert "sync.warm_start_steps" not in plan.tuned(diloco).changed


def beside_ours(name, **link):
  """Fields of ours, and of a method that is linked to a clock or another."""
  given = sweeps.values()
  given["methods"][sweeps.NAMES.index(name)] |= link
  plan = RequiredRuns(sweep(given), sweeps.loss_of)
  return [plan.fields(plan.sweep.method(each)) for each in ("ours_1gbit", name)]


def test_a_method_may_have_the_rounds_of_another():
  ours, diloco = beside_ours("diloco", interval_of="ours_1gbit")
  interval = "sync.sync_interval"
  assert diloco[interval] == ours[interval] != 6
  assert "sync.overlap_steps" not in diloco


def test_a_method_that_waits_a_round_gets_one_that_just_hides_the_exchange():
  ours, waits = beside_ours("dilocox_continue", tau_from="1gbit")
  tau = ours["sync.overlap_steps"]
  assert waits["sync.sync_interval"] == fitting_interval(tau, 48)
  assert "sync.overlap_steps" not in waits


def test_one_method_that_cannot_go_on_stops_no_other():
  def only_diloco_works(run):
    return sweeps.loss_of(run) if run.name == "diloco" else math.nan

  plan = sweeps.required(only_diloco_works)
  methods = plan.sweep.methods
  ((task, runs, reasons),) = plan.tasks(["results"], methods)
  assert task == "results" and {run.name for run in runs} == {"diloco"}
  assert len(reasons) == len(methods) - 1


def test_a_method_that_no_setting_trains_is_told_by_an_earlier_task():
  """Also one that is in no contest, of which the last task says nothing."""

  def diloco_diverges(run):
    return math.nan if run.name == "diloco" else sweeps.loss_of(run)

  contest = {
    "clock": "1gbit",
    "reference": "dilocox_continue",
    "methods": ("allreduce", "dilocox_continue"),
  }
  plan = sweeps.required(diloco_diverges, equal_time=[contest])
  reasons = {
    task: reasons for task, _, reasons in plan.tasks(TASKS, plan.sweep.methods)
  }
  assert reasons.pop("tune_inner") == reasons.pop("equal_time") == []
  for why in reasons.values():
    assert len(why) == 1 and "'diloco' diverged" in why[0]


RATES = (1e-3, 2e-3, 3e-3, 4e-3)


def untuned(**changed):
  """A sweep with nothing to try: the settings of its methods are given."""
  given = sweeps.values(**changed)
  given["tuning"]["inner_learning_rates"] = ()
  for method, rate in zip(given["methods"], RATES, strict=True):
    method |= {"refine": (), "inner.learning_rate": rate}
  return given


def test_without_rates_to_try_methods_run_with_the_settings_they_have():
  plan = RequiredRuns(sweep(untuned()))  # No run has ended.
  plan.check()
  found = {task: sweeps.runs_of(task, plan) for task in TASKS}
  assert found["tune_inner"] == found["tune_outer"] == []
  rates = [run.config.inner.learning_rate for run in found["results"]]
  assert rates == [rate for rate in RATES for _ in (0, 1)]
  assert found["equal_time"]
  for method in plan.sweep.methods:
    tuned = plan.tuned(method)
    own = {"inner.learning_rate": method.changed["inner.learning_rate"]}
    assert own.items() <= tuned.changed.items() and not tuned.edges


def test_settings_to_try_need_rates_to_try():
  given = untuned()
  for method in given["methods"]:
    method["refine"] = ({"inner_factor": 2.0},)
  with pytest.raises(ValueError, match="needs the best of tuning"):
    sweep(given)
