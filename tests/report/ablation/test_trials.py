import dataclasses
import math
import pathlib
import statistics

import pytest

from dilocox_jax.metrics import read_rows
from dilocox_jax.report.ablation.trials import (
  SettingResult,
  TrialOutcome,
  entries,
  pareto_front,
)


def outcome(workdir, name="a", seed=0, failure=""):
  return TrialOutcome(
    name, seed, workdir, {}, {}, 1.0, failure, workdir / "log"
  )


def entry(name, sent_bytes, *losses):
  return SettingResult(
    name,
    "corpus",
    {},
    {},
    tuple(range(len(losses))),
    losses,
    len(losses),
    sent_bytes,
    1.0,
    (),
  )


def test_a_settings_loss_is_the_mean_of_its_seeds(write_run, tmp_path):
  floors = (1.9, 2.0, 2.3)
  outcomes = [
    outcome(write_run(tmp_path / str(seed), floor=floor), seed=seed)
    for seed, floor in enumerate(floors)
  ]
  finals = [read_rows(o.workdir / "metrics.jsonl")[-1] for o in outcomes]
  (found,) = entries(outcomes)
  losses = [row["outer_loss"] for row in finals]
  assert found.losses == tuple(losses) and found.seeds == (0, 1, 2)
  assert found.validation_loss == pytest.approx(sum(losses) / 3)
  spread = statistics.pstdev(losses) * math.sqrt(3 / 2)
  assert found.standard_error == pytest.approx(spread / math.sqrt(3))
  assert found.total_sent_bytes == finals[0]["total_sent_bytes"]
  assert not found.is_incomplete


def test_one_seed_has_no_standard_error(write_run, tmp_path):
  (found,) = entries([outcome(write_run(tmp_path / "a"))])
  assert math.isnan(found.standard_error)


def test_a_seed_that_failed_is_missed(write_run, tmp_path):
  ended = outcome(write_run(tmp_path / "a"))
  failed = outcome(tmp_path / "b", seed=1, failure="lost")
  (found,) = entries([ended, failed])
  assert found.seeds == (0,) and found.num_seeds == 2 and found.is_incomplete


@pytest.mark.parametrize("field", ["digest", "held_out"])
def test_seeds_on_two_texts_are_two_entries(write_run, tmp_path, field):
  outcomes = [
    outcome(write_run(tmp_path / digest, **{field: digest}), seed=seed)
    for seed, digest in enumerate(("aaaa", "bbbb"))
  ]
  found = entries(outcomes)
  assert sorted(len(each.losses) for each in found) == [1, 1]
  for digest in ("aaaa", "bbbb"):
    assert sum(digest in each.corpus for each in found) == 1
  assert not any(each.is_incomplete for each in found)


def test_the_lowest_loss_comes_first(write_run, tmp_path):
  outcomes = [
    outcome(write_run(tmp_path / name, floor=floor), name)
    for name, floor in (("b", 2.0), ("c", 2.2), ("a", 1.8))
  ]
  assert [each.name for each in entries(outcomes)] == ["a", "b", "c"]


def test_the_front_has_what_nothing_beats_in_both():
  found = [
    entry("cheap", 10, 3.0),
    entry("as cheap and worse", 10, 3.1),
    entry("dear and no better", 20, 3.0),
    entry("middle", 30, 2.5),
    entry("beaten", 40, 2.6),
    entry("best", 50, 2.0),
  ]
  for order in (found, found[::-1]):
    names = [each.name for each in pareto_front(order)]
    assert names == ["cheap", "middle", "best"]


def test_a_loss_that_is_not_finite_is_on_no_front():
  nan = entry("nan", 1, math.nan)
  good = entry("good", 2, 2.0)
  assert pareto_front([nan, good]) == [good]
  assert pareto_front([dataclasses.replace(good), nan]) == [good]


def test_a_run_that_is_not_there_is_refused(tmp_path):
  with pytest.raises(ValueError, match="not a run directory"):
    entries([outcome(pathlib.Path(tmp_path / "nowhere"))])
