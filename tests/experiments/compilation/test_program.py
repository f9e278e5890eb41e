"""The window whose program is compiled, for devices of this machine."""

import dataclasses
import math

import jax
import pytest

from dilocox_jax.config import to_plan
from experiments.compilation.analysis import analyse
from experiments.compilation.program import steady_program
from tests import runs

STREAMING = {
  "method": "streaming_diloco",
  "sync_interval": 6,
  "num_fragments": 2,
  "overlap_steps": 1,
}


@pytest.mark.parametrize("sync", [STREAMING, {"method": "diloco"}])
def test_a_window_sends_the_plans_bytes_and_the_rest_of_the_state_is_kept(sync):
  config = runs.settings(layout="mesh", total_steps=30, **sync)
  program, traffic = steady_program(config), to_plan.traffic(config)
  found = analyse(program, program.lowered.compile())
  numbers = range(config.fragments.num_fragments)
  assert found.planned_bytes == max(map(traffic.exchange_bytes, numbers))
  assert found.num_steps == sync.get("overlap_steps", 3)
  sizes = [
    4
    * sum(map(math.prod, traffic.fragments.shapes(p, traffic.shapes).values()))
    for p in numbers
  ]
  # Parameters and momentum of the fragment that sends less.
  assert found.memory["kept"] == 2 * sum(sorted(sizes)[:-1])
  assert found.needed_bytes >= found.memory["kept"] + found.memory["arguments"]


def test_memory_of_the_host_is_none_of_the_devices():
  config = runs.settings(layout="mesh", total_steps=30, **STREAMING)
  mesh = dataclasses.replace(config.mesh, outer_memory="pinned_host")
  assert not steady_program(dataclasses.replace(config, mesh=mesh)).kept_bytes


def test_a_run_of_which_nothing_arrives_is_refused():
  config = runs.settings(layout="mesh", total_steps=6)
  with pytest.raises(ValueError, match="take at least 9"):
    steady_program(config)


def test_averaged_gradients_are_a_segment_of_steps():
  config = runs.settings(layout="mesh", method="allreduce", sync_interval=None)
  program = steady_program(config)
  assert isinstance(program.lowered, jax.stages.Lowered)
  assert program.planned_bytes == to_plan.traffic(config).segment_bytes(
    to_plan.run_plan(config).segment(0)
  )
