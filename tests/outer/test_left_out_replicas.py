"""A replica that is not finite is left out of the mean, and its drift shows it.

This holds at every exchange, under every rule and aggregator, in a round and
in the flush.
"""

import jax
import numpy as np
import optax
import pytest

from dilocox_jax.aggregators.feedback import exchange
from dilocox_jax.plan.schedule import methods
from tests.oracles.least_squares import make_problem
from tests.outer.problem import batches_of, begin, nesterov

INTERVAL, BAD, NUM_REPLICAS = 4, 1, 3
STEPS = 14  # Three rounds and half of one: something is always unsent.
PROBLEM = make_problem(6, NUM_REPLICAS, STEPS, 4, 2, 3)
SGD = optax.sgd(0.05)

METHODS = {
  "diloco": methods.diloco(INTERVAL),
  "reset": methods.dilocox(INTERVAL, "reset"),
  "continue": methods.dilocox(INTERVAL),
  "continue, two in flight": methods.delayed(INTERVAL, 1, 6, "continue"),
  "mix": methods.streaming_diloco(INTERVAL, 2, 1),
  "eager": methods.eager(INTERVAL),
}
AGGREGATORS = {
  "mean": exchange(),
  "int4, feedback": exchange("int(bits=4)", feedback=1.0),
  "mask, int8": exchange("random_mask(fraction=0.5)+int(bits=8)"),
  "rank 1": exchange("low_rank(rank=1)"),
}


def exchanges_of(method, aggregator, bad_step):
  """Yields (event, drift [M]) of every exchange of a run, flush included.

  The bad replica's parameters turn to NaN in inner step `bad_step`.
  """
  params, inputs, targets = PROBLEM
  targets = targets.copy()
  targets[BAD, bad_step - 1] = np.nan
  problem = params, inputs, targets
  programs, state = begin(
    problem, method, SGD, nesterov(), aggregator=AGGREGATORS[aggregator]
  )
  schedule = method.schedule
  state, _, drifts = programs.run(state, batches_of(problem, 0, STEPS))
  yield from paired(schedule.windows(0, STEPS), drifts)
  state, drifts = programs.flush(state)
  yield from paired(schedule.flush_windows(STEPS), drifts)
  for leaf in jax.tree.leaves([each.params for each in state.fragments]):
    # Under "eager" every replica has outer parameters of its own.
    healthy = np.delete(leaf, BAD, 0) if method.rule == "eager" else leaf
    assert np.isfinite(healthy).all()


def paired(windows, drifts):
  events = [window.applied for window in windows if window.applied]
  return zip(events, drifts, strict=True)


@pytest.mark.parametrize(
  ("name", "aggregator"),
  [(name, "mean") for name in METHODS]
  + [("diloco", name) for name in AGGREGATORS if name != "mean"],
)
@pytest.mark.parametrize("bad_step", [8, STEPS], ids=["round", "flush"])
def test_a_replica_left_out_shows_in_the_drift(name, aggregator, bad_step):
  num_bad = 0
  for event, drift in exchanges_of(METHODS[name], aggregator, bad_step):
    finite = np.isfinite(drift.own_squared)
    assert np.isfinite(drift.mean_squared)
    assert finite[[0, 2]].all()
    if event.send_step < bad_step:
      assert finite[BAD]
    elif event.send_step == bad_step:
      assert not finite[BAD]
      num_bad += 1
  assert num_bad >= 1
