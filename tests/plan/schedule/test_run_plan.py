import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.run_plan import RunPlan, Segment

METHODS = [
  methods.allreduce(),
  methods.diloco(5),
  methods.streaming_diloco(6, 3, 4),
  methods.dilocox(4),
  methods.delayed(4, 2, 9),
]


@st.composite
def plans(draw):
  method = draw(st.sampled_from(METHODS))
  total = draw(st.integers(1, 40))
  per_dispatch = draw(st.integers(1, 9))
  kinds = ["none"]
  if method.exchanged == "pseudo_gradient" and total > 1:
    kinds += ["data_parallel", "single"]
  warm_start = draw(st.sampled_from(kinds))
  steps = 0 if warm_start == "none" else draw(st.integers(1, total - 1))
  return RunPlan(method, total, warm_start, steps, per_dispatch)


@given(plans())
def test_segments_cover_the_run_without_a_gap(plan):
  reached = 0
  for segment in plan.segments():
    assert segment.start == reached
    assert segment.num_steps > 0
    reached = segment.stop
  assert reached == plan.total_steps


@given(plans())
def test_phases_follow_each_other_as_the_warm_start_says(plan):
  segments = list(plan.segments())
  for segment in segments:
    assert segment.phase == plan.phase(segment.start)
    if segment.start < plan.warm_start_steps:
      assert segment.phase == plan.warm_start
    elif plan.method.exchanged == "gradient":
      assert segment.phase == "data_parallel"
    else:
      assert segment.phase == "rounds"
  ends = [segment.stop for segment in segments if segment.ends_phase]
  assert ends == ([plan.warm_start_steps] if plan.warm_start_steps else [])


@given(plans())
def test_a_dispatch_is_a_round_or_at_most_the_chosen_length(plan):
  for segment in plan.segments():
    if segment.phase != "rounds":
      assert segment.num_steps <= plan.steps_per_dispatch
      assert not segment.windows
      continue
    interval = plan.method.schedule.sync_interval
    assert (segment.start - plan.local_start) % interval == 0
    assert sum(w.num_steps for w in segment.windows) == segment.num_steps


@given(plans())
def test_rounds_walk_the_schedule_from_their_own_first_step(plan):
  walked = [
    event
    for segment in plan.segments()
    for window in segment.windows
    for event in (window.applied, window.sent)
    if event
  ]
  steps = plan.total_steps - plan.local_start
  assert sorted(walked) == sorted(plan.method.schedule.events(0, steps))


@given(plans())
def test_a_restart_at_a_boundary_gives_the_same_tail(plan):
  segments = list(plan.segments())
  for index, segment in enumerate(segments):
    assert list(plan.segments(segment.stop)) == segments[index + 1 :]


@given(st.integers(0, 50), st.integers(1, 20), st.integers(0, 30))
def test_a_segment_crosses_an_interval_where_a_step_of_it_is_a_multiple(
  start, num_steps, interval
):
  segment = Segment("rounds", start, num_steps)
  steps = range(start + 1, start + num_steps + 1)
  multiples = [s for s in steps if interval and s % interval == 0]
  assert segment.crosses(interval) == bool(multiples)


@pytest.mark.parametrize("warm_start", ["data_parallel", "single"])
def test_a_warm_start_is_cut_by_length_and_rounds_by_interval(warm_start):
  plan = RunPlan(methods.diloco(4), 17, warm_start, 7, steps_per_dispatch=5)
  cuts = [(s.phase, s.start, s.stop, s.ends_phase) for s in plan.segments()]
  assert cuts == [
    (warm_start, 0, 5, False),
    (warm_start, 5, 7, True),
    ("rounds", 7, 11, False),
    ("rounds", 11, 15, False),
    ("rounds", 15, 17, False),
  ]


@pytest.mark.parametrize(
  "warm_start, first", [("data_parallel", 3), ("single", 1)]
)
def test_steps_of_all_replicas_leave_out_those_that_wait(warm_start, first):
  plan = RunPlan(methods.diloco(4), 15, warm_start, 7, steps_per_dispatch=7)
  steps = [segment.replica_steps(3) for segment in plan.segments()]
  assert steps == [7 * first, 4 * 3, 4 * 3]


def test_allreduce_is_one_phase_without_rounds():
  plan = RunPlan(methods.allreduce(), 7, steps_per_dispatch=3)
  assert plan.local_start == 7
  assert list(plan.segments()) == [
    Segment("data_parallel", 0, 3),
    Segment("data_parallel", 3, 3),
    Segment("data_parallel", 6, 1),
  ]
