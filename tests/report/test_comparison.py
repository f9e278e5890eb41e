"""Which runs are compared, with what, and what titles say of them."""

import json

import pytest

from dilocox_jax.report import comparison, load_run, side_by_side, tables
from tests.report.frames import CLOCK, frame, setting


def test_a_time_title_names_what_is_sooner_and_its_baseline():
  allreduce = setting("allreduce", [2.0, 2.0], 8_000, seconds={CLOCK: 900.0})
  diloco = setting("diloco", [2.0, 2.0], 1_000, seconds={CLOCK: 90.0})
  title = comparison._time_title(frame(allreduce, diloco, target=3.0), CLOCK)
  # Each has its second of three evaluations at a loss of 3.
  assert title == (
    "On '1gbit' DiLoCo reaches loss 3 in 1 ± 0 min, AllReduce in 10 ± 0 min"
  )


def test_settings_at_equal_tokens_are_those_with_the_usual_number():
  usual = [setting(name, [2.0, 2.0], 10) for name in ("allreduce", "a")]
  short = setting("short", [2.0, 2.0], 10, steps=50)
  stopped = setting("diverged", [float("nan"), 2.0], 10, steps=50)
  longer = setting("longer", [float("nan"), 2.0], 10, steps=150)
  page = comparison.Page("x", frame(*usual, short, stopped, longer))
  names = [each.name for each in page.equal.settings]
  assert names == ["allreduce", "a", "diverged"]


@pytest.mark.parametrize(
  ("methods", "baseline"),
  [
    (["diloco", "allreduce"], "allreduce"),
    (["allreduce", "diloco"], "allreduce"),
    # AllReduce is not there, and this sends in every step.
    (["diloco", "cocktail_sgd"], "diloco"),
    (["diloco"], ""),
  ],
)
def test_the_baseline_is_allreduce_or_what_sent_most(
  write_run, tmp_path, methods, baseline
):
  runs = [
    load_run(
      write_run(
        tmp_path / method,
        method=method,
        num_steps=60 if method == "diloco" else 30,
      )
    )
    for method in methods
  ]
  page = side_by_side(runs)
  assert {each.baseline for each in page.frame.settings} == {baseline}


def test_an_average_on_one_side_is_said(write_run, tmp_path):
  runs = []
  for name, power in (("diloco", 14), ("muloco", 0)):
    folder = write_run(tmp_path / name, method=name, num_steps=30)
    config = json.loads((folder / "config.json").read_text())
    config["outer"] = {"average_power": power}
    (folder / "config.json").write_text(json.dumps(config))
    runs.append(load_run(folder))
  page = side_by_side(runs)
  assert "Evaluated on an average of the parameters: diloco." in page.intro
  assert not any("differ" in line for line in page.intro)


def test_runs_with_one_name_have_the_names_of_their_directories(
  write_run, tmp_path
):
  folders = [tmp_path / "a" / "x", tmp_path / "b" / "x", tmp_path / "y"]
  runs = [load_run(write_run(each, num_steps=30)) for each in folders]
  names = [each.name for each in side_by_side(runs).frame.settings]
  assert names == [
    "diloco (x)",
    f"diloco ({folders[1]})",
    "diloco (y)",
  ]


def test_the_price_has_both_times_and_both_numbers_of_tokens():
  allreduce = setting("allreduce", [2.0, 4.0], 8_000, seconds={CLOCK: 900.0})
  diloco = setting("diloco", [1.8, 3.6], 1_000, seconds={CLOCK: 90.0})
  assert tables.price(frame(allreduce, diloco)) == (
    "DiLoCo sends 8.00x less than AllReduce, in 1.5 min of simulated time"
    " instead of 15 min; its loss is 10.0 ± 0.0 % lower"
  )
  one = frame(
    setting("allreduce", [2.0], 8_000),
    setting("diloco", [2.2], 10),
    num_seeds=1,
  )
  assert tables.price(one).endswith("its loss is 10.0 % higher (one seed)")
