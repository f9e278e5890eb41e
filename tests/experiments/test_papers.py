"""The papers' settings: a round's windows by shape, with nothing allocated."""

from typing import Any

import chex
import jax
import numpy as np
import pytest

from dilocox_jax.config import from_mapping
from dilocox_jax.training import build, states
from experiments.configs import papers

# The tests have 8 devices; 107B over two clusters of 16 keeps its pipeline.
FEWER_DEVICES = {"dilocox_107b": {"num_stages": 4, "num_data_shards": 1}}
LATE = 5  # By this round all that can arrive does.
# One of each method and model family; the others differ in sizes alone.
KINDS = (
  "dilocox_opt_1_3b",
  "dilocox_107b",
  "open_diloco_150m",
  "streaming_35m",
)


def described(name, **changes):
  values = papers.get_config(name).to_dict()
  for section, fields in changes.items():
    values[section] |= fields
  return from_mapping(values)


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(
      name, marks=[] if name in KINDS else [pytest.mark.slow], id=name
    )
    for name in papers.PAPERS
  ],
)
def test_every_window_of_a_round_fits_together_at_full_size(name):
  config = described(name, mesh=FEWER_DEVICES.get(name, {}))
  programs, schedule = build.programs(config), config.sync.named.schedule
  rounds, num_replicas = programs.rounds, config.mesh.num_replicas
  data, interval = config.data, schedule.sync_interval
  rows = (interval, data.batch_size, data.sequence_length + 1)
  batches = jax.ShapeDtypeStruct((num_replicas, *rows), np.int32)
  step, seen = LATE * interval, set()
  for window in schedule.windows(step, step + interval):
    in_flight = schedule.num_in_flight(step)
    step += window.num_steps
    if rounds.kind(window) in seen:
      continue
    seen.add(rounds.kind(window))
    state: Any = states.abstract(programs, "rounds", in_flight=in_flight)
    after: Any = states.abstract(
      programs, "rounds", in_flight=schedule.num_in_flight(step)
    )
    progress, *fragments, _ = rounds.lowered(state, batches, window).out_info
    same_shapes(progress.replica, after.replica)
    assert progress.metrics.loss.shape == (num_replicas, interval)
    events = window.applied, None if window.is_same else window.sent
    for event, found in zip(events, fragments, strict=True):
      assert (event is None) == (found is None)
      if event:
        same_shapes(found, after.fragments[event.fragment])
  assert any(kind.applied is not None for kind in seen)


def same_shapes(found, expected):
  found, expected = (
    jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), each
    )
    for each in (found, expected)
  )
  chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
