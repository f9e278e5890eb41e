import pytest

from dilocox_jax.config import from_mapping
from dilocox_jax.plan.model.presets import MODEL_PRESETS
from experiments.configs import (
  convergence_gpu,
  convergence_long,
  convergence_medium,
  convergence_muon,
  convergence_small,
)
from experiments.sweeps import method_list
from experiments.sweeps.required_runs import RequiredRuns
from experiments.sweeps.sweep_spec import (
  SweepClock,
  check_convergence_field,
  sweep,
)
from tests.experiments.sweeps import fakes as sweeps


@pytest.mark.parametrize(
  "config",
  [
    convergence_small.get_config(),
    convergence_medium.get_config(),
    *(
      convergence_gpu.get_config(f"{shape},{replicas}")
      for shape in convergence_gpu.SHAPES
      for replicas in (2, 4)
    ),
  ],
)
def test_every_config_is_a_fair_sweep(config):
  found = sweep(config.to_dict())
  assert len(found.tuning.inner_learning_rates) >= 5
  assert len({len(method.refine) for method in found.methods}) == 1
  assert found.tuning.seed not in found.seeds
  assert len(found.seeds) >= 3


@pytest.mark.slow
def test_the_long_config_compares_what_is_hidden_with_all_others():
  plan = RequiredRuns(sweep(convergence_long.get_config().to_dict()))
  found = plan.sweep
  hidden = ("overlap_loco", "overlap_loco_adamw", "dilocox_continue_107b")
  for clock, contest in found.equal_time.items():
    for method in map(found.method, contest.methods):
      full = plan.steps_at(method, clock) == found.base["total_steps"]
      assert full == (method.name in hidden), (clock, method.name)
  assert found.tuning_runs == 0 and len(found.seeds) == 3
  # Settings were chosen on seed 0.
  assert found.tuning.seed == 0 and 0 not in found.seeds


def test_with_muon_methods_have_the_rounds_that_they_have_with_adamw():
  muon = RequiredRuns(sweep(convergence_muon.get_config().to_dict()))
  small = RequiredRuns(sweep(convergence_small.get_config().to_dict()))
  assert muon.sweep.tuning_runs == 7 and muon.sweep.seeds == small.sweep.seeds
  of = {method.name: method for method in small.sweep.methods}
  for method in muon.sweep.methods:
    other = of[method.name if method.name in of else _with_adamw(method.name)]
    fields, others = muon.fields(method), small.fields(other)
    assert muon.sweep.config(fields).inner.optimizer == "muon"
    assert fields | {"inner.optimizer": ""} == others | {"inner.optimizer": ""}
    assert all(setting in other.refine for setting in method.refine)
  rates = small.sweep.tuning.inner_learning_rates
  assert set(muon.sweep.tuning.inner_learning_rates) < set(rates)


def _with_adamw(name):
  return name.replace("_muon", "")


def test_whoever_could_win_on_a_clock_has_equal_time_there():
  found = sweep(convergence_small.get_config().to_dict())
  clocks = list(found.equal_time)
  for clock, contest in found.equal_time.items():
    other = next(name for name in clocks if name != clock)
    left_out = {method.name for method in found.methods} - {*contest.methods}
    assert {n for n in left_out if not n.endswith(other)} == {
      *("diloco", "allreduce_muon_average")
    }


def test_the_small_config_has_every_method_of_the_comparison():
  found = sweep(convergence_small.get_config().to_dict())
  by_name = {m.name: found.config(m.changed).sync for m in found.methods}
  assert {sync.method for sync in by_name.values()} == {
    *("allreduce", "cocktail_sgd", "diloco", "open_diloco", "eager"),
    *("streaming_diloco", "dilocox", "sparse_loco", "muloco", "delayed"),
    "overlap_loco",
  }
  schedules = {n: s.named.schedule for n, s in by_name.items()}
  assert schedules["open_diloco_long"].sync_interval == 500
  assert schedules["streaming"].overlap_steps == 0
  assert schedules["streaming_overlap"].overlap_steps == 4
  for rule in ("reset", "continue"):
    for clock in found.clusters:
      assert by_name[f"dilocox_{rule}_{clock}"].rule == rule


def test_open_diloco_is_compared_at_the_rounds_of_dilocox():
  plan = RequiredRuns(sweep(convergence_small.get_config().to_dict()))
  for clock, contest in plan.sweep.equal_time.items():
    names = (contest.reference, f"open_diloco_{clock}")
    first, other = (plan.fields(plan.sweep.method(name)) for name in names)
    assert first["sync.sync_interval"] == other["sync.sync_interval"]
    assert "open_diloco_long" in contest.methods


def test_all_who_have_an_outer_optimizer_see_the_same_settings():
  found = sweep(convergence_small.get_config().to_dict())
  seen = set()
  for method in found.methods:
    config = found.config(method.changed)
    if method.refine == method_list.INNER_GRID:
      assert config.sync.named.schedule.sync_interval == 1
      continue
    settings = [{}, *method.refine]
    outers = [found.config({**method.changed, **s}).outer for s in settings]
    seen.add(frozenset((o.learning_rate, o.momentum) for o in outers))
  assert len(seen) == 1 and len(next(iter(seen))) == 6


def equal_time(**changed):
  return {"equal_time": [sweeps.values()["equal_time"][0] | changed]}


@pytest.mark.parametrize(
  "changed, hint",
  [
    ({"seeds": (0, 1000)}, "tuned on flatter"),
    ({"gaps": {"dilocoo": 0.1}}, "did you mean 'diloco'?"),
    ({"clocks": []}, "unknown field 'clocks'"),
    (
      {
        "claims": [
          sweeps.ALIKE | {"better": "diloco", "than": (), "at": "2gbit"}
        ]
      },
      "did you mean '1gbit'?",
    ),
    (equal_time(methods=("diloco",)), "lacks 'dilocox_continue'"),
    (equal_time(methods=("dilocoo",)), "did you mean 'diloco'?"),
    (equal_time(clock="107b"), "clock of equal_time '1gbit'"),
  ],
)
def test_a_mistake_is_one_line_that_says_what_to_change(changed, hint):
  with pytest.raises(ValueError, match=hint) as caught:
    sweeps.sweep(**changed)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("first, second", [(1, 1), (1, 2)])
def test_rounds_of_one_who_has_those_of_another_are_refused(first, second):
  given = sweeps.values()
  for method, other in ((first, second), (second, first)):
    given["methods"][method]["interval_of"] = given["methods"][other]["name"]
  with pytest.raises(ValueError, match="name the last one"):
    sweep(given)


def test_a_method_with_a_larger_budget_is_refused():
  given = sweeps.values()
  given["methods"][0]["refine"] = given["methods"][0]["refine"][1:]
  with pytest.raises(ValueError, match="as many settings"):
    sweep(given)


def test_a_wrong_field_of_a_method_is_named_with_it():
  given = sweeps.values()
  given["methods"][1]["codec.bit"] = 4
  with pytest.raises(ValueError, match="'diloco': unknown .* 'bits'"):
    sweep(given)


def test_a_field_of_the_base_is_checked_as_that_of_a_run():
  check_convergence_field("base.sync.sync_interval")
  with pytest.raises(ValueError, match="sync_interval"):
    check_convergence_field("base.sync.sync_intervall")


def test_a_clock_times_another_model_whole():
  config = from_mapping(
    {
      "model": {"preset": "tiny", "num_heads": 2, "num_layers": 3},
      "codec": {"name": "low_rank+int", "rank": 8},
    }
  )
  changed = {"model.preset": "qwen_107b", "codec.rank": 2048}
  spec = SweepClock("1gbit", None, changed)
  timed = spec.timed(config)
  assert timed.model.shape == MODEL_PRESETS["qwen_107b"]
  assert timed.codec.rank == 2048 and timed.sync == config.sync
  plain = from_mapping({"codec": {"name": "float32"}})
  assert spec.timed(plain).codec == plain.codec
