"""What a picture of many settings shows, and who is in front."""

import numpy as np
import pytest

from dilocox_jax.report import panels, style
from tests.report.frames import ALLREDUCE, CLOCK, frame, setting


def many(*losses):
  """A frame of AllReduce at 2.0 and of others with these losses."""
  first = setting("allreduce", [2.0, 2.0], 8_000)
  others = [
    setting(f"diloco {n}", [loss, loss], 1_000 + n)
    for n, loss in enumerate(losses)
  ]
  return frame(first, *others)


def test_a_setting_far_above_the_others_does_not_squeeze_them():
  found = many(2.1, 2.2, 2.3, 2.4, 2.5, 9.0)
  limits, above, front = panels._view(found, panels.TOKENS)
  # The median end is 2.3, the median distance 0.2, so 3.1 is the most; the
  # highest end below is 2.5, and 0.6 of what lies between is above it.
  assert limits == pytest.approx((2.0 - 0.04 * 0.8, 2.5 + 0.6 * 0.5))
  assert above == f"; above the axis: {style.proper('diloco 5')}"
  assert front == [
    "allreduce",
    "diloco 0",
    *(f"diloco {n}" for n in range(1, 5)),
  ]
  ax = panels.loss_panel(found, panels.TOKENS, "all").axes[0]
  assert ax.get_ylim() == pytest.approx(limits)


def test_few_settings_are_shown_whole():
  limits, above, front = panels._view(many(2.1, 9.0), panels.TOKENS)
  assert limits is None and not above
  assert front == ["allreduce", "diloco 0", "diloco 1"]


def test_what_reaches_the_target_sooner_is_first():
  slow = setting("slow", [2.0, 2.0], 10, seconds={CLOCK: 300.0})
  fast = setting("fast", [2.0, 2.0], 20, seconds={CLOCK: 90.0})
  never = setting("never", [2.6, 2.6], 20, seconds={CLOCK: 3.0})
  found = panels.first_to(
    frame(ALLREDUCE, slow, fast, never, target=2.5), CLOCK
  )
  assert found is fast


def test_a_curve_has_its_mean_its_band_and_the_seeds_that_are_missing():
  found = panels.curve(
    setting("diloco", [2.0, 4.0], 3_000), panels.BYTES, 10.0, 3
  )
  assert found.x == [100.0, 200.0, 300.0]
  assert found.y == [5.0, 4.0, 3.0]
  assert found.low == [4.0, 3.0, 2.0] and found.high == [6.0, 5.0, 4.0]
  assert found.label == "DiLoCo (2 of 3 seeds)"
  alone = panels.curve(setting("diloco", [2.0], 3_000), panels.TOKENS, 1.0, 1)
  assert not alone.low and alone.label == "DiLoCo"


def test_the_axis_of_tokens_says_whose_they_are():
  apart = setting("muloco", [2.0, 2.0], 1_000, uses_mailbox=True)
  for settings, whose in (
    ([ALLREDUCE], "all replicas"),
    ([apart], "one replica"),
    ([ALLREDUCE, apart], "all replicas (with a mailbox: one)"),
  ):
    ax = panels.loss_panel(frame(*settings), panels.TOKENS, "all").axes[0]
    assert ax.get_xlabel() == f"k tokens, {whose}"


def test_what_begins_without_cost_is_left_out_of_a_logarithmic_axis():
  silent = setting("diloco", [2.0, 2.0], 0)
  assert panels.curve(silent, panels.BYTES, 1.0, 2).x == []
  assert len(panels.curve(silent, panels.TOKENS, 1.0, 2).x) == 3


def test_the_axis_of_time_has_the_unit_of_what_ends_first():
  hour = setting("allreduce", [2.0, 2.0], 8_000, seconds={CLOCK: 7200.0})
  also = setting("diloco", [2.0, 2.0], 1_000, seconds={CLOCK: 3600.0})
  ax = panels.loss_panel(frame(hour, also), CLOCK, "time").axes[0]
  assert ax.get_xscale() == "linear"
  assert ax.get_xlabel().startswith("simulated time (h)")
  ends = {line.get_gid(): np.array(line.get_xdata())[-1] for line in ax.lines}
  assert ends["allreduce"] == pytest.approx(2.0)
  assert ends["diloco"] == pytest.approx(1.0)
