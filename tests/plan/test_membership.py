"""Who takes part in which round, and what it counts."""

import numpy as np
import pytest

from dilocox_jax.plan.schedule.membership import (
  Membership,
  named_absences,
  named_inner_steps,
)
from dilocox_jax.plan.schedule.sync_schedule import SyncSchedule

WAITS = SyncSchedule(4)


def test_drawn_absences_have_their_rate_and_somebody_always_stays():
  members = Membership(WAITS, 2, absence_rate=0.5, seed=1)
  present = np.array([members.present(r) for r in range(2000)])
  assert present.any(axis=1).all()
  # Both would be away in a quarter of the rounds; then the first one stays.
  np.testing.assert_allclose(present.mean(axis=0), [0.75, 0.5], atol=0.04)
  again = Membership(WAITS, 2, absence_rate=0.5, seed=2)
  assert any((again.present(r) != present[r]).any() for r in range(20))


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
