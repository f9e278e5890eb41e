"""Connections start anew after a silence, and not after every step."""

import dataclasses

import numpy as np
import pytest

from dilocox_jax.simulate.analytic import AnalyticClock, run_time
from dilocox_jax.simulate.idle_time import IdleTime
from dilocox_jax.simulate.link_costs import LinkCosts, message_steps
from dilocox_jax.simulate.transfer import RETRANSMISSION_TIMEOUT_S, TCP
from tests.simulate import small
from tests.simulate.test_agreement import assert_agree, both

LONG_S = 1.5 * RETRANSMISSION_TIMEOUT_S
FAR = small.cluster(2, bps=1e10, rtt_s=0.1)


def test_a_silence_is_long_after_steps_that_last_longer_than_the_timeout():
  silence = IdleTime(2)
  assert silence.end().all()  # Nothing was ever sent.
  silence.add(np.array([0.6, 0.4]) * LONG_S)
  assert not silence.end().any()
  for _ in range(2):
    silence.add(np.array([0.6, 0.2]) * LONG_S)
  assert silence.end().tolist() == [True, False]
  assert not silence.end().any()


@pytest.mark.parametrize("step_s, times", [(LONG_S, 9), (LONG_S / 2, 1)])
def test_slow_start_is_paid_after_a_silence_alone(step_s, times):
  script, plan = small.script("allreduce", total_steps=9)
  work = small.work(FAR, step_s)
  slow, events, _ = both(FAR, script, plan, work, is_ideal=False)
  assert_agree(slow, events)
  never = LinkCosts(FAR, dataclasses.replace(TCP, starts_slowly=False))
  fast = run_time(never, work, script.ops(plan))
  first = message_steps(script.traffic.gradient()[0], 2)[0]
  once_s = small.link_costs(FAR, False).slow_start_s(first)[0]
  assert once_s > 0
  assert slow.total_s - fast.total_s == pytest.approx(times * once_s)


def test_a_clock_remembers_its_idle_time():
  script, plan = small.script("allreduce", total_steps=6)
  link_costs, work = small.link_costs(FAR, False), small.work(FAR, LONG_S / 2)
  ops = list(script.ops(plan))
  first, second = (
    AnalyticClock(link_costs, work),
    AnalyticClock(link_costs, work),
  )
  first.walk(ops[:7])
  second.set_state(first.get_state())
  assert second.walk(ops[7:]).now_s == run_time(link_costs, work, ops).now_s
