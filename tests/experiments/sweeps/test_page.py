"""Lines of a sweep joined with their clocks."""

import pathlib

import pytest

from dilocox_jax.report.convergence import page
from dilocox_jax.report.page import PAGE
from experiments.configs import (
  convergence_long,
  convergence_muon,
  convergence_small,
)
from experiments.sweeps.page import Gathered, baselines
from experiments.sweeps.required_runs import TASKS, RequiredRuns
from experiments.sweeps.results import Results
from experiments.sweeps.run_maker import KeptRuns
from experiments.sweeps.simulated_time import PlannedTime
from experiments.sweeps.sweep_spec import sweep
from tests.experiments.sweeps import fakes as sweeps


@pytest.fixture(name="made", scope="module")
def made_fixture(tmp_path_factory):
  """A finished sweep: its plan, and what it found."""
  folder = tmp_path_factory.mktemp("made")
  with pytest.MonkeyPatch.context() as patch:
    sweeps.stand_in(patch)
    plan = sweeps.required()
    results = Results(folder / "kept.csv", plan.sweep.base)
    runs = KeptRuns(results, folder / "work", any_text=False)
    plan.loss_of = runs.loss
    sweeps.make_all(plan, runs)
    yield plan, runs, Gathered(plan, runs).comparison("made", "x")


def test_every_point_has_the_time_of_its_step_on_every_clock(made):
  plan, runs, found = made
  for entry, method in zip(found.entries, plan.sweep.methods, strict=True):
    config = plan.results(method)[0].config
    for name, clock in plan.sweep.clusters.items():
      times = PlannedTime(config, clock).times()
      assert entry.seconds[name] == times.end_s
      for trace in entry.traces:
        seconds = [point.seconds[name] for point in trace.points]
        after = [times.after(point.tokens // 64) for point in trace.points]
        assert seconds[:-1] == after[:-1] and seconds[-1] == times.end_s
        assert seconds == sorted(set(seconds))


def test_losses_and_bytes_are_those_of_the_lines(made):
  plan, runs, found = made
  for entry, method in zip(found.entries, plan.sweep.methods, strict=True):
    rows = [runs.row(each) for each in plan.results(method)]
    assert entry.spread.losses == tuple(row.final_loss for row in rows)
    assert entry.sent_bytes == rows[0].total_sent_bytes
    assert entry.tuning_runs == plan.sweep.tuning_runs


def test_it_is_known_for_which_clock_the_rounds_of_a_method_were_made(tmp_path):
  values = convergence_small.get_config().to_dict()
  plan = RequiredRuns(sweep(values))
  results = Results(tmp_path / "kept.csv", plan.sweep.base)
  runs = KeptRuns(results, tmp_path / "work", any_text=False)
  gathered = Gathered(plan, runs)
  clocks = {m.name: gathered._clock_of(m) for m in plan.sweep.methods}
  for clock in plan.sweep.clusters:
    for name in ("ours", "dilocox_reset", "open_diloco"):
      assert clocks.pop(f"{name}_{clock}") == clock
    assert clocks.pop(f"dilocox_continue_{clock}") == clock
  assert set(clocks.values()) == {""}


def test_at_equal_time_everyone_has_the_steps_that_fit(made):
  plan, runs, found = made
  for each in found.equal_time:
    assert each.budget_s == plan.budget_s(each.clock)
    for timed in each.methods:
      method = plan.sweep.method(timed.name)
      planned = plan.equal_time(method, each.clock)
      assert timed.is_too_few == (not planned)
      assert timed.losses == tuple(map(runs.loss, planned))
      assert all(run.config.total_steps == timed.steps for run in planned)


def test_the_page_says_what_it_took(made):
  plan, _, found = made
  assert f"All {len(_planned(made))} runs on file took" in found.budget
  assert f"{plan.sweep.base['total_steps']} inner steps" in found.budget


def _planned(made):
  plan, _, _ = made
  every = [run for task in TASKS for run in sweeps.runs_of(task, plan)]
  return {str(run.config.to_mapping()) for run in every}


def test_a_gap_is_to_allreduce_with_the_same_inner_optimizer():
  small = sweep(convergence_small.get_config().to_dict())
  found = baselines(small)
  assert found.pop("muloco") == "allreduce_muon"
  # An average on one side would be taken for a merit of the exchange.
  assert found.pop("overlap_loco") == "allreduce_muon_average"
  assert set(found.values()) == {"allreduce"}


def test_a_clock_says_what_it_times_and_what_it_leaves_out(made):
  _, _, found = made
  assert found.clocks["1gbit"].endswith("(stated); codecs take no time")
  assert "1gbit (round trip 40 ms)" in found.clocks["1gbit"]
  assert "on the losses of nano, low rank at 2048 there" in found.clocks["107b"]


@pytest.mark.slow
@pytest.mark.parametrize(
  "module", [convergence_small, convergence_muon, convergence_long]
)
def test_the_committed_page_is_what_the_committed_lines_say(tmp_path, module):
  kept = pathlib.Path(__file__).parents[3] / "docs/results"
  name = module.__name__.rpartition(".")[2]
  committed = (kept / name / PAGE).read_text()
  plan = RequiredRuns(sweep(module.get_config().to_dict()))
  results = Results(kept / f"{name}.csv", plan.sweep.base)
  runs = KeptRuns(results, tmp_path, any_text=True)
  plan.loss_of = runs.loss
  command = committed.splitlines()[2].strip()
  found = Gathered(plan, runs).comparison(name, command)
  assert page.write_convergence(found, tmp_path).read_text() == committed
