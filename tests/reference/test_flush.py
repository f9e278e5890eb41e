"""When a fragment moves, and what is brought in when a run ends."""

import numpy as np
import pytest

from dilocox_jax.reference import optimizers
from tests.oracles import least_squares
from tests.reference.test_methods import AVERAGE, PROBLEM, distance, train


def mean_of(trees):
  vectors = [least_squares.to_vector(tree) for tree in trees]
  return sum(vectors) / len(vectors)


def moves(rule, overlap_steps, outer):
  """The steps at which theta of each of three fragments changes."""
  changed = [[], [], []]
  before = least_squares.split(PROBLEM[0])
  for step in range(1, 15):
    run = train(
      rule,
      sync_interval=6,
      num_fragments=3,
      overlap_steps=overlap_steps,
      outer=outer,
      num_steps=step,
      flush=False,
    )
    theta = run.theta[0] if rule == "eager" else run.theta
    after = least_squares.split(theta)
    divided = least_squares.fragment_names(PROBLEM[0], 3, "strided")
    for p, names in enumerate(divided):
      if any(np.any(after[n] != before[n]) for n in names):
        changed[p].append(step)
    before = after
  return changed


def test_each_fragment_moves_at_its_own_steps():
  assert moves("reset", 0, AVERAGE) == [[6, 12], [2, 8, 14], [4, 10]]
  assert moves("continue", 3, AVERAGE) == [[9], [5, 11], [7, 13]]
  assert moves("continue", 8, AVERAGE) == [[14], [10], [12]]
  assert moves("eager", 6, AVERAGE) == [[6, 12], [2, 8, 14], [4, 10]]


def test_each_fragment_counts_its_own_outer_steps():
  first_only = optimizers.Sgd(lambda count: 1.0 if count == 0 else 0.0)
  assert moves("reset", 0, first_only) == [[6], [2], [4]]
  assert moves("eager", 6, first_only) == [[6], [2], [4]]


@pytest.mark.parametrize("num_fragments", [1, 3])
def test_flushing_what_is_already_exchanged_changes_nothing(num_fragments):
  settings = {"sync_interval": 1, "num_fragments": num_fragments}
  kept = train("reset", flush=False, **settings)
  flushed = train("reset", flush=True, **settings)
  assert distance(kept.theta, flushed.theta) == 0.0


def test_a_flush_lets_what_is_in_flight_act_on_later_progress():
  settings = {"overlap_steps": 3, "mixing_alpha": 0.3, "outer": AVERAGE}
  sent = mean_of(train("mix", num_steps=10, flush=False, **settings).params)
  last = mean_of(train("mix", num_steps=12, flush=False, **settings).params)
  end = train("mix", num_steps=12, **settings).theta
  expected = 0.3 * last + 0.7 * sent
  assert np.max(np.abs(least_squares.to_vector(end) - expected)) < 1e-12


def test_a_flush_after_a_whole_round_of_delay_measures_first():
  settings = {"overlap_steps": 5, "outer": AVERAGE}
  alone = train("reset", sync_interval=99, num_steps=10, flush=False)
  sent = mean_of(alone.params)  # nothing has been applied before step 10
  last = mean_of(train("reset", num_steps=12, flush=False, **settings).params)
  end = train("reset", num_steps=12, **settings).theta
  start = least_squares.to_vector(PROBLEM[0])
  expected = last + (sent - start)
  assert np.max(np.abs(least_squares.to_vector(end) - expected)) < 1e-12
