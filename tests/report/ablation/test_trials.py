import math
import pathlib
import statistics

import pytest

from dilocox_jax.metrics import read_rows
from dilocox_jax.report.ablation.trials import (
  TrialOutcome,
  setting_results,
)


def outcome(workdir, name="a", seed=0, failure=""):
  return TrialOutcome(
    name, seed, workdir, {}, {}, 1.0, failure, workdir / "log"
  )


def test_a_settings_loss_is_the_mean_of_its_seeds(write_run, tmp_path):
  floors = (1.9, 2.0, 2.3)
  outcomes = [
    outcome(write_run(tmp_path / str(seed), floor=floor), seed=seed)
    for seed, floor in enumerate(floors)
  ]
  finals = [read_rows(o.workdir / "metrics.jsonl")[-1] for o in outcomes]
  (found,) = setting_results(outcomes)
  losses = [row["outer_loss"] for row in finals]
  assert found.spread.losses == tuple(losses) and found.seeds == (0, 1, 2)
  assert found.spread.mean == pytest.approx(sum(losses) / 3)
  spread = statistics.pstdev(losses) * math.sqrt(3 / 2)
  assert found.spread.standard_error == pytest.approx(spread / math.sqrt(3))
  assert found.sent_bytes == finals[0]["total_sent_bytes"]
  assert found.num_seeds == 3


def test_one_seed_has_no_standard_error(write_run, tmp_path):
  (found,) = setting_results([outcome(write_run(tmp_path / "a"))])
  assert math.isnan(found.spread.standard_error)


def test_a_seed_that_failed_is_missed(write_run, tmp_path):
  ended = outcome(write_run(tmp_path / "a"))
  failed = outcome(tmp_path / "b", seed=1, failure="lost")
  (found,) = setting_results([ended, failed])
  assert found.seeds == (0,) and found.num_seeds == 2


@pytest.mark.parametrize("field", ["digest", "held_out"])
def test_seeds_on_two_texts_are_two_entries(write_run, tmp_path, field):
  outcomes = [
    outcome(write_run(tmp_path / digest, **{field: digest}), seed=seed)
    for seed, digest in enumerate(("aaaa", "bbbb"))
  ]
  found = setting_results(outcomes)
  assert sorted(len(each.seeds) for each in found) == [1, 1]
  for digest in ("aaaa", "bbbb"):
    assert sum(digest in each.corpus for each in found) == 1
  assert [each.num_seeds for each in found] == [1, 1]


def test_the_lowest_loss_comes_first(write_run, tmp_path):
  outcomes = [
    outcome(write_run(tmp_path / name, floor=floor), name)
    for name, floor in (("b", 2.0), ("c", 2.2), ("a", 1.8))
  ]
  assert [each.name for each in setting_results(outcomes)] == ["a", "b", "c"]


def test_a_run_that_is_not_there_is_refused(tmp_path):
  with pytest.raises(ValueError, match="not a run directory"):
    setting_results([outcome(pathlib.Path(tmp_path / "nowhere"))])
