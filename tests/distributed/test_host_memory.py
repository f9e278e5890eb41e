"""Where the outer state lies changes no bit of what a run computes.

`tests/outer/test_methods.py` holds the rounds of all methods to it.
"""

import dataclasses
import functools
import shutil
from types import SimpleNamespace
from unittest import mock

import jax
import pytest

from dilocox_jax.config import RunConfig
from dilocox_jax.distributed import host_memory
from dilocox_jax.training import build
from tests import runs

HOST = host_memory.HOST
train = functools.partial(runs.train, overrides=runs.TINY)


def kinds(tree):
  """Where the leaves of a state lie."""
  return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def on_host(config):
  mesh = dataclasses.replace(config.mesh, outer_memory=HOST)
  return dataclasses.replace(config, mesh=mesh)


@pytest.mark.skipif(
  host_memory.unsupported(HOST, jax.local_devices()) is not None,
  reason="these devices have no host memory of their own",
)
def test_a_whole_run_goes_on_and_writes_the_same_rows_from_host_memory(
  tmp_path,
):
  """Evaluation, checks and saves read the outer state too."""
  config = runs.settings(
    method="streaming_diloco",
    total_steps=12,
    num_fragments=2,
    overlap_steps=1,
    layout="mesh",
    evaluation={"interval_steps": 0},
    exchange={"codec": "int(bits=8)", "feedback": 1.0},
    outer={"average_power": 3.0},
  )
  train(config, tmp_path / "device", until=6)
  # It was saved by a run whose outer state lay on the devices.
  shutil.copytree(tmp_path / "device", tmp_path / "host")
  train(config, tmp_path / "device")
  train(on_host(config), tmp_path / "host")
  rows = runs.rows(tmp_path / "host")
  assert rows == runs.rows(tmp_path / "device")
  state, _ = runs.saved(tmp_path / "host")
  assert kinds(state.fragments) == {HOST}
  assert kinds((state.replica, state.step)) == {host_memory.DEVICE}
  runs.assert_same_bits(state, runs.saved(tmp_path / "device")[0])


def test_a_memory_that_devices_lack_is_refused_by_name():
  drum = SimpleNamespace(kind="drum")
  lacking = SimpleNamespace(
    platform="abacus", addressable_memories=lambda: [drum]
  )
  with (
    mock.patch.object(jax, "local_devices", return_value=[lacking]),
    pytest.raises(ValueError, match="outer_memory.*abacus.* only drum"),
  ):
    build.programs(on_host(RunConfig()))
