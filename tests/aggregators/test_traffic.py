from hypothesis import given
from hypothesis import strategies as st

from dilocox_jax.aggregators.collectives import message_bytes
from dilocox_jax.aggregators.traffic import Traffic
from dilocox_jax.codecs.quantize import Int
from dilocox_jax.plan.collective import Collective
from dilocox_jax.plan.schedule import methods
from dilocox_jax.plan.schedule.fragments import Fragments
from dilocox_jax.plan.schedule.run_plan import RunPlan

SHAPES = {"embed": (7, 3), "blocks/w": (5, 3, 2), "blocks/b": (5, 3)}
NUM_VALUES = 21 + 30 + 15
# Strided in three: layers 0, 2, 4 and layers 1, 3, with nine values each; the
# shorter one is padded.
FRAGMENT_VALUES = (21, 27, 27)


def traffic(method, num_replicas, **kwargs):
  num_fragments = method.schedule.num_fragments
  fragments = Fragments(num_fragments, 5, method.fragment_order)
  return Traffic(method, fragments, SHAPES, num_replicas, **kwargs)


def ring(num_values, num_replicas):
  """Bytes of fp32 values and a flag on a ring."""
  operand_bytes = 4 * num_values + 4
  return Collective("all_reduce", operand_bytes).sent_bytes(num_replicas)


def gradients(num_replicas):
  return ring(NUM_VALUES, num_replicas)


def exchange(num_values, num_replicas):
  return ring(num_values, num_replicas)


def run_bytes(plan, num_replicas):
  counted = traffic(plan.method, num_replicas)
  total = sum(counted.segment_bytes(segment) for segment in plan.segments())
  if plan.local_start < plan.total_steps:
    total += counted.flush_bytes(plan.total_steps - plan.local_start)
  return total


def test_an_exchange_carries_its_fragment_alone():
  counted = traffic(methods.streaming_diloco(30, 3, 4), 2)
  for fragment, values in enumerate(FRAGMENT_VALUES):
    assert counted.exchange_bytes(fragment) == 4 * values + 4
  assert counted.gradient_bytes() == 4 * NUM_VALUES + 4


def schedules(parts):
  """H and tau for a number of fragments."""
  return st.integers(parts, 12).flatmap(
    lambda interval: st.tuples(
      st.just(interval), st.just(parts), st.integers(0, 3 * interval)
    )
  )


@given(
  st.sampled_from([1, 3]).flatmap(schedules),
  st.integers(1, 60),
  st.integers(0, 9),
)
def test_every_send_of_a_run_is_paid_for_once(schedule, steps, warm_steps):
  method = methods.delayed(*schedule)
  plan = RunPlan(
    method,
    steps + warm_steps,
    "data_parallel" if warm_steps else "none",
    warm_steps,
    steps_per_dispatch=4,
  )
  interval, parts, _ = schedule
  num_replicas = 3
  expected = warm_steps * gradients(num_replicas)
  for fragment in range(parts):
    phase = fragment * interval // parts
    sent = [s for s in range(1, steps + 1) if (s - phase) % interval == 0]
    # What is done since the last send is exchanged at the end.
    sends = len(sent) + (max(sent, default=0) < steps)
    values = FRAGMENT_VALUES[fragment] if parts > 1 else NUM_VALUES
    expected += sends * exchange(values, num_replicas)
  assert run_bytes(plan, num_replicas) == expected


def test_allreduce_sends_all_gradients_at_every_step():
  plan = RunPlan(methods.allreduce(), 7, steps_per_dispatch=3)
  assert run_bytes(plan, 2) == 7 * gradients(2)


def test_one_replica_sends_nothing():
  for method in methods.diloco(4), methods.eager(4), methods.allreduce():
    assert run_bytes(RunPlan(method, 11), 1) == 0
  warmed = RunPlan(methods.diloco(4), 11, "data_parallel", 3)
  assert run_bytes(warmed, 1) == 0


def test_a_warm_start_on_one_replica_sends_nothing():
  plan = RunPlan(methods.diloco(4), 11, "single", 3)
  warm, *rounds = plan.segments()
  counted = traffic(plan.method, 2)
  assert counted.segment_bytes(warm) == 0
  assert [counted.segment_bytes(s) for s in rounds] == [
    exchange(NUM_VALUES, 2)
  ] * 2


def test_bytes_fall_due_when_a_fragment_arrives():
  plan = RunPlan(methods.streaming_diloco(30, 3, 4), 60)
  first, second = plan.segments()
  counted = traffic(plan.method, 2)
  # Fragment 0 leaves with step 30 and arrives in the second round.
  layers = 2 * exchange(27, 2)
  assert counted.segment_bytes(first) == layers
  assert counted.segment_bytes(second) == exchange(21, 2) + layers
  # In flight is fragment 0; 1 and 2 have steps that were never sent.
  assert counted.flush_bytes(60) == exchange(21, 2) + layers


def test_a_codec_shrinks_the_exchange_but_not_a_warm_start():
  counted = traffic(methods.diloco(4), 2, codec=Int(8))
  assert counted.exchange_bytes(0) == message_bytes(Int(8), SHAPES) + 1
  assert counted.gradient_bytes() == gradients(2)
  gathered = traffic(
    methods.diloco(4), 2, codec=Int(8), collective="all_gather"
  )
  assert gathered.gradient() == counted.gradient()
  every_step = traffic(methods.allreduce(), 2, codec=Int(8))
  assert every_step.gradient_bytes() == message_bytes(Int(8), SHAPES) + 1
