"""The weight of a message is that of the inner steps behind it."""

import json

from dilocox_jax.mailbox_protocol.step_counts import StepCounts


def test_steps_count_from_one_measurement_to_the_next():
  steps = StepCounts()
  steps.add(2)
  steps.measure(0)
  steps.add(4)
  steps.measure(1)
  steps.add(3)
  steps.measure(0)
  assert [steps.take(0), steps.take(1), steps.take(0)] == [2, 6, 7]


def test_a_newcomer_has_no_part_in_what_is_in_flight():
  steps = StepCounts()
  steps.add(5)
  steps.measure(0)
  steps.restart([2, 1])
  steps.add(3)
  steps.measure(0)
  assert [steps.take(0) for _ in range(3)] == [0, 0, 3]
  assert steps.take(1) == 0


def test_a_checkpoint_holds_the_counts():
  steps = StepCounts()
  steps.add(2)
  steps.measure(1)
  steps.add(1)
  other = StepCounts()
  other.set_state(json.loads(json.dumps(steps.get_state())))
  for each in (steps, other):
    each.add(4)
    each.measure(1)
    each.measure(0)
    assert [each.take(1), each.take(1), each.take(0)] == [2, 5, 7]
