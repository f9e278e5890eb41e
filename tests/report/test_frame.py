import math

import pytest

from dilocox_jax.report import tables
from dilocox_jax.report.frame import (
  Frame,
  Setting,
  frame_of,
  mean,
  standard_error,
)
from dilocox_jax.report.run import load_run
from tests.report.frames import (
  ALLREDUCE,
  BOTH,
  CLOCK,
  DILOCO,
  NOISY,
  frame,
  setting,
  trace,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
  ("values", "middle", "error"),
  [
    ([1.0, 3.0], 2.0, 1.0),
    ([1.0], 1.0, NAN),
    ([1.0, NAN], INF, NAN),
    ([], NAN, NAN),
  ],
)
def test_means_have_errors_and_a_seed_that_diverged_is_not_hidden(
  values, middle, error
):
  assert mean(values) == pytest.approx(middle, nan_ok=True)
  assert standard_error(values) == pytest.approx(error, nan_ok=True)


@pytest.mark.parametrize(
  ("changed", "gap", "error"),
  [
    (DILOCO, 6.1 / 6 - 1, 0.01),  # Paired: 3 % and 1 %.
    (NOISY, 0.0, 0.075),  # 10 % above and 5 % below.
    (ALLREDUCE, NAN, NAN),
    (setting("one seed", [2.06], 10), 0.03, NAN),
    (setting("diverged", [2.0, NAN], 10), INF, NAN),
    (setting("alone", [2.0], 10, baseline="gone"), NAN, NAN),
  ],
)
def test_gaps_are_paired_by_seed(changed, gap, error):
  found = frame(ALLREDUCE, changed).gap(changed)
  assert found == pytest.approx((gap, error), nan_ok=True)


def test_bytes_are_compared_with_the_baseline_or_with_fp32():
  assert BOTH.fewer_bytes(DILOCO) == 8
  assert math.isnan(BOTH.fewer_bytes(setting("none", [1.0], 0)))
  alone = setting("alone", [1.0], 10, baseline="", fp32_bytes=50.0)
  assert Frame([alone]).fewer_bytes(alone) == 5


@pytest.mark.parametrize(
  ("losses", "sent", "name"),
  [
    ([2.06, 4.04], 1_500, "diloco"),  # It sends more.
    ([2.06, 4.04], 500, "other"),
    ([2.9, 4.9], 500, "diloco"),  # It is more than a tenth above.
    ([2.06], 500, "diloco"),  # A seed is missing.
  ],
)
def test_the_cheapest_is_near_its_baseline_and_complete(losses, sent, name):
  found = frame(ALLREDUCE, DILOCO, setting("other", losses, sent)).cheapest()
  assert found and found.name == name


def test_nothing_on_the_front_is_beaten_in_loss_and_bytes():
  points = {"a": (3, 10), "b": (2, 20), "worse": (2.5, 30), "c": (1, 40)}
  settings = [setting(k, [x, x], y) for k, (x, y) in points.items()]
  settings.append(setting("diverged", [NAN, 1.0], 1))
  front = frame(*reversed(settings)).pareto_front()
  assert [each.name for each in front] == ["a", "b", "c"]


@pytest.mark.parametrize(
  ("losses", "target", "seconds"),
  [
    ((2.0, 1.0), 1.5, 15.0),  # 2 at 10 s, 1 at 20 s.
    ((2.0, 1.0), 2.0, 10.0),
    ((2.0, 1.0), 0.5, INF),
    ((1.0, 2.0), 1.5, 10.0),
  ],
)
def test_a_loss_is_reached_between_two_evaluations(losses, target, seconds):
  run = trace(0, losses[-1], 10, losses=losses, seconds=20.0)
  assert Setting("a", [run]).seconds_to(CLOCK, target) == [seconds]


def test_a_table_has_means_errors_and_times():
  some = frame(*BOTH.settings, setting("late", [5.0], 10), target=2.1)
  rows = tables.table(some, ("run", "loss", "gap", "sent bytes"), clock=CLOCK)
  assert rows[1] == {
    "run": "diloco",
    "loss": "3.0500 ± 0.9900",
    "gap": "+1.67 ± 1.00 %",
    "sent bytes": "1.00 kB",
    "utilisation": "50.0 %",
    "simulated time": "1.67 min",
    "to loss 2.1": "1 of 2 seeds",
  }
  assert rows[0]["gap"] == "-" and rows[-1]["run"] == "late (1 of 2 seeds)"
  assert rows[-1]["to loss 2.1"] == "not reached"


def test_losses_at_equal_time_are_those_when_the_first_setting_is_done():
  settings = [
    Setting(
      name,
      [trace(0, 1.0, 1, steps=10, losses=losses, seconds=end_s)],
      seconds={CLOCK: end_s},
    )
    for name, losses, end_s in (
      ("done", (2.0, 1.0), 20.0),
      ("behind", (6.0, 2.0), 30.0),  # At 15 and 30 s.
      ("not evaluated yet", (1.0,), 200.0),
    )
  ]
  shown = tables.at_equal_time(Frame(settings), CLOCK)
  cells = [cell for row in shown for cell in row.values()]
  assert cells == ["1.0000", "4.6667", "1 step"]


def test_what_no_run_has_reached_is_said_in_words():
  (row,) = tables.table(Frame([Setting("a", [])], 2), list(tables.CELLS))
  assert row["run"] == "a (0 of 2 seeds)" and row["loss"] == "none yet"


@pytest.mark.parametrize(
  ("settings", "words"),
  [
    ([ALLREDUCE, DILOCO], ["8.00x less", "1.7 min", "1.7 ± 1.0 % higher"]),
    ([ALLREDUCE, NOISY], ["same within its error"]),
    ([ALLREDUCE], []),
    ([ALLREDUCE, setting("same bytes", [2.0, 4.0], 8_000)], []),
    ([ALLREDUCE, setting("silent", [2.0, 4.0], 0)], ["sends nothing"]),
  ],
)
def test_a_price_claims_a_difference_only_beyond_its_error(settings, words):
  found = tables.price(frame(*settings)).replace("1.67", "1.7")
  assert [word for word in words if word not in found] == []
  assert bool(found) == bool(words)


def test_runs_are_settings_with_one_seed(write_run, tmp_path):
  run = load_run(write_run(tmp_path, finish=False))
  found = frame_of({"mine": run})
  (only,) = found.settings
  assert only.label == "mine (not finished)" and not found.clocks
  assert only.losses == [run.validation_loss]
  assert [p.loss for p in only.curves[0]] == [
    each.outer_loss for each in run.evaluations
  ]
  record = found.records()[0]
  assert record["loss"] == run.validation_loss
  assert record["sent_bytes"] == run.total_sent_bytes
