"""Who takes part in which round, and what it counts."""

import numpy as np
import pytest

from dilocox_jax.plan.schedule.membership import (
  Membership,
  named_absences,
  named_inner_steps,
)
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule

WAITS, LATE = SyncSchedule(4), SyncSchedule(4, 1, 6)


def attendance(membership, round_index):
  start = round_index * membership.schedule.sync_interval
  stop = start + membership.schedule.sync_interval
  windows = membership.schedule.windows(start, stop)
  return membership.attendance(round_index, windows)


def test_the_example_of_the_module():
  members = Membership(WAITS, 3, ((2, 1, 1),), inner_steps=(4, 2, 4))
  first, second, third = (attendance(members, r) for r in range(3))
  assert first.members == (0, 1, 2) and second.members == (0, 1)
  assert first.num_steps == (4, 2, 4) and second.num_steps == (4, 2, 0)
  # The weights sum to the number of participants: 3 * (4, 2, 4) / 10.
  assert first.windows[0].weights == pytest.approx((1.2, 0.6, 1.2))
  assert second.windows[0].weights == pytest.approx((4 / 3, 2 / 3, 0))
  assert second.returning == () and third.returning == (2,)
  assert third.donor == 0


def test_what_was_sent_before_an_absence_is_left_out():
  """H = 4 and tau = 6: what is sent after step 4 is applied after step 10."""
  weights = {
    away: [
      window.weights
      for r in range(5)
      for window in attendance(Membership(LATE, 2, ((1, *away),)), r).windows
      if window.weights
    ]
    for away in [(1, 1), (2, 2)]
  }
  both, alone = (1.0, 1.0), (1.0, 0.0)
  # Sent after 4, 8 and 12 in the rounds 0 to 2, applied in the rounds 2 to 4.
  assert weights[1, 1] == [alone, alone, both]
  assert weights[2, 2] == [alone, alone, alone]


def test_a_slow_replica_steps_evenly_through_the_windows():
  schedule = SyncSchedule(6, 3, 1)
  members = Membership(schedule, 2, inner_steps=(6, 3))
  windows = attendance(members, 1).windows
  steps = [window.num_steps for window in windows]
  assert steps == [(1, 0), (1, 1)] * 3


def test_the_donor_was_present_in_the_round_before():
  members = Membership(WAITS, 3, ((0, 1, 1), (1, 2, 2)))
  assert attendance(members, 2).returning == (0,)
  assert attendance(members, 2).donor == 1  # It leaves, but is still there.


def test_drawn_absences_have_their_rate_and_somebody_always_stays():
  members = Membership(WAITS, 2, absence_rate=0.5, seed=1)
  present = np.array([members.present(r) for r in range(2000)])
  assert present.any(axis=1).all()
  # Both would be away in a quarter of the rounds; then the first one stays.
  np.testing.assert_allclose(present.mean(axis=0), [0.75, 0.5], atol=0.04)
  again = Membership(WAITS, 2, absence_rate=0.5, seed=2)
  assert any((again.present(r) != present[r]).any() for r in range(20))


@pytest.mark.parametrize(
  ("changes", "hint"),
  [
    ({"absences": ((2, 0, 1),)}, "one of 2 replicas"),
    ({"absences": ((1, 3, 2),)}, "not after the last"),
    ({"absences": ((0, 1, 5), (1, 4, 4))}, "no replica in round 4"),
    ({"inner_steps": (4,)}, "must be 2 numbers"),
    ({"inner_steps": (0, 4)}, "from 1"),
    ({"inner_steps": (3, 3)}, "the largest is 4"),
    ({"inner_steps": (5, 4)}, "to sync_interval=4"),
  ],
)
def test_what_cannot_be_is_refused(changes, hint):
  with pytest.raises(ValueError, match=hint):
    Membership(WAITS, 2, **changes)


def test_texts_are_read():
  assert named_absences("") == () and named_inner_steps("") == ()
  assert named_absences("1:3-5;0:8") == ((1, 3, 5), (0, 8, 8))
  assert named_inner_steps("32,16") == (32, 16)
  for text in ("1", "1:a", "1:3-", "-1:2"):
    with pytest.raises(ValueError, match="must be of the form"):
      named_absences(text)
  for text in ("a", "1,,2", "1,", "-3"):
    with pytest.raises(ValueError, match="must be numbers"):
      named_inner_steps(text)
