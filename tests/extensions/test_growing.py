"""A schedule whose H grows is trained, counted and simulated like any other."""

import dataclasses

import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.config import to_plan
from dilocox_jax.config.recipes import RECIPES, register_recipe
from dilocox_jax.plan.schedule.methods import (
  METHODS,
  Method,
  register_method,
  with_interval,
)
from dilocox_jax.plan.schedule.sync_schedule import Window
from tests.extensions import runs
from tests.extensions.growing import GrowingSchedule, growing

pytestmark = pytest.mark.usefixtures("growing_registered")

ENDS = [2, 4, 8, 12, 20, 28]  # H = 2


def config(num_steps=10):
  return runs.config(num_steps, sync={"method": "growing", "sync_interval": 2})


def test_rounds_double_after_every_two():
  schedule = GrowingSchedule(2)
  starts = [0, *ENDS[:-1]]
  for index, (start, end) in enumerate(zip(starts, ENDS, strict=True)):
    assert schedule.round_at(start) == (index, end - start)
    (window,) = schedule.windows(start, end)
    assert window.num_steps == end - start
    assert window.sent and window.sent.step == end


def test_a_run_has_the_rounds_of_the_schedule():
  segments = list(to_plan.run_plan(config()).segments())
  assert [segment.num_steps for segment in segments] == [2, 2, 4, 2]
  assert [len(segment.windows) for segment in segments] == [1] * 4
  assert segments[-1].windows == (Window(2),)


def test_a_run_trains_and_its_flush_sends_the_rest():
  programs, state = runs.assert_it_trains(config())
  _, drifts = programs.rounds.flush(state)
  assert len(drifts) == 1
  assert not GrowingSchedule(2).flush_windows(8)


def test_a_run_is_simulated_and_every_send_is_paid_for():
  outcome = runs.simulated(config())
  per_exchange = to_plan.traffic(config()).exchange_bytes(0)
  assert outcome.sent_bytes == 4 * per_exchange  # After 2, 4, 8 and 10.
  assert outcome.num_steps == 10


def test_its_recipe_comes_with_its_name():
  assert config().outer.momentum == 0.9


def test_what_takes_rounds_of_one_length_refuses_it():
  with pytest.raises(ValueError, match="rounds of one length"):
    with_interval(growing(), 5)


@dataclasses.dataclass(frozen=True)
class Miscounted(GrowingSchedule):
  def round_at(self, step):
    index, num_steps = super().round_at(step)
    return index, 2 * num_steps


def miscounted() -> Method:
  return Method(Miscounted(2))


@pytest.mark.parametrize(
  "build, message",
  [
    (growing, "method 'growing' is registered already"),
    (miscounted, r"'miscounted': round_at\(4\) has index 2 instead of 1"),
  ],
)
def test_a_schedule_that_contradicts_itself_is_refused(build, message):
  before = dict(METHODS)
  with pytest.raises(ValueError, match=message):
    register_method(build)
  assert dict(METHODS) == before


@pytest.mark.parametrize(
  "method, field, message",
  [
    ("growin", "outer.momentum", "unknown method 'growin': did you mean"),
    ("diloco", "outer.nesterov", "unknown field of recipe 'diloco'"),
    ("growing", "outer.momentum", "recipe 'growing' is registered already"),
  ],
)
def test_a_recipe_that_nothing_would_read_is_refused(method, field, message):
  before = dict(RECIPES)
  with pytest.raises(ValueError, match=message):
    register_recipe(method, {field: 0.5})
  assert dict(RECIPES) == before


def test_a_transform_of_single_steps_refuses_it():
  with pytest.raises(ValueError, match="take dilocox_jax.make_rounds"):
    dx.growing(optax.sgd(0.1), optax.sgd(1.0), sync_interval=2)
