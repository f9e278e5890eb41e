"""The program of a round is the same however much a round does."""

import jax
import numpy as np
import pytest

from dilocox_jax.training import build
from tests.outer import nano

# No other axis may have this length: lowering shares the code of leaves whose
# shapes happen to be equal, and then prints fewer operations.
NUM_REPLICAS = 5
LATE = 5  # By this round all that can arrive does.
# Base: 12 steps, 12 layers and, with fragments, 3 of them. The delay is given
# in steps a twelfth of a round, so that it stays the same part of a round.
CASES = {
  "diloco": ({"method": "diloco"}, None),
  "streaming_diloco": ({"method": "streaming_diloco"}, 1),
  "dilocox": ({"method": "dilocox"}, None),
  "eager": ({"method": "eager"}, None),
  "several_in_flight": ({"method": "delayed", "rule": "continue"}, 25),
  "whole_rounds_in_flight": ({"method": "delayed", "rule": "continue"}, 24),
}
SLICES = {"method": "delayed", "rule": "continue", "fragment_order": "sliced"}
QUICK = ("diloco", "streaming_diloco")
HAS_FRAGMENTS = {"streaming_diloco", "eager", "slices", *list(CASES)[4:]}


def num_operations(name, interval=12, num_layers=12, num_fragments=3):
  settings, twelfths = (CASES | {"slices": (SLICES, 1)})[name]
  if twelfths:
    settings = {**settings, "overlap_steps": twelfths * interval // 12}
  if name in HAS_FRAGMENTS:
    settings = {**settings, "num_fragments": num_fragments}
  config = nano.config(
    num_steps=10 * interval,
    num_replicas=NUM_REPLICAS,
    batch_size=2,
    model={"num_layers": num_layers},
    sync_interval=interval,
    **settings,
  )
  programs, schedule = build.programs(config), config.sync.named.schedule
  shapes, tables = programs.rounds.groups(schedule.round_windows(LATE))
  params = jax.eval_shape(programs.model.init, jax.random.key(0))
  optimizer = jax.eval_shape(programs.steps.optimizer.init, params)
  state = programs.rounds.abstract(params, optimizer)
  batch = (NUM_REPLICAS, interval, 2, nano.SEQUENCE_LENGTH + 1)
  batches = jax.ShapeDtypeStruct(batch, np.int32)
  lowered = programs.rounds.compiled(shapes).lower(state, batches, tables)
  return sum(" = " in line for line in lowered.as_text().splitlines())


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in CASES
  ],
)
def test_more_of_everything_is_the_same_number_of_operations(name):
  larger = {"interval": 48, "num_layers": 48, "num_fragments": 5}
  assert num_operations(name) == num_operations(name, **larger)


@pytest.mark.slow
@pytest.mark.parametrize(
  "larger", [{"interval": 48}, {"num_layers": 48}, {"num_fragments": 5}]
)
@pytest.mark.parametrize("name", CASES)
def test_more_of_one_thing_is_the_same_number_of_operations(name, larger):
  assert num_operations(name) == num_operations(name, **larger)


def test_where_an_apply_ends_its_window_no_steps_are_compiled_after_it():
  # H / P = tau, so each apply falls on the send of the next fragment.
  ends = num_operations("streaming_diloco", num_fragments=12)
  assert ends < 0.9 * num_operations("streaming_diloco")


def test_slices_are_one_loop_whatever_their_number():
  few = num_operations("slices", num_fragments=2)
  assert num_operations("slices", num_fragments=4) == few
  # Fragments of layers need three groups of windows.
  assert few < 0.6 * num_operations("several_in_flight", num_fragments=4)
