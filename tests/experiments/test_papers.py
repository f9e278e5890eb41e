"""The papers' settings: a round's windows by shape, with nothing allocated."""

from typing import Any

import jax
import numpy as np
import pytest

from dilocox_jax.config import from_mapping
from dilocox_jax.training import build, states
from experiments.configs import papers
from tests.tiers import slow

# The tests have 8 devices; 107B over two clusters of 16 keeps its pipeline.
FEWER_DEVICES = {"dilocox_107b": {"num_stages": 4, "num_data_shards": 1}}
LATE = 5  # By this round all that can arrive does.
# A layer of the largest model, and fragments; others differ in sizes alone.
KINDS = ("dilocox_107b", "streaming_35m")


def described(name, **changes):
  values = papers.get_config(name).to_dict()
  for section, fields in changes.items():
    values[section] |= fields
  return from_mapping(values)


@pytest.mark.parametrize(
  "name",
  [*KINDS, *slow(*(each for each in papers.PAPERS if each not in KINDS))],
)
def test_every_window_of_a_round_is_traced_at_full_size(name):
  config = described(name, mesh=FEWER_DEVICES.get(name, {}))
  programs = build.programs(config)
  schedule = config.sync.named.schedule
  interval = schedule.sync_interval
  shape = (
    config.mesh.num_replicas,
    interval,
    config.data.batch_size,
    config.data.sequence_length + 1,
  )
  batches = jax.ShapeDtypeStruct(shape, np.int32)
  step = LATE * interval
  kinds = {}
  for window in schedule.windows(step, step + interval):
    kind = programs.rounds.kind(window)
    kinds.setdefault(kind, (window, schedule.num_in_flight(step)))
    step += window.num_steps
  for window, in_flight in kinds.values():
    state: Any = states.abstract(programs, "rounds", in_flight=in_flight)
    progress, *_ = programs.rounds.lowered(state, batches, window).out_info
    assert progress.metrics.loss.shape == (shape[0], interval)
  assert any(kind.applied_group is not None for kind in kinds)
