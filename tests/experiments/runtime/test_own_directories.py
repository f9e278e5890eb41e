"""Which runs go on when processes do not see one directory."""

import jax
import pytest

from dilocox_jax.training import own_checkpoints
from experiments.runtime import running
from experiments.runtime.command_line import UsageError
from tests import runs


def _config(**changes):
  return runs.settings(layout="mesh", **{"method": "diloco", **changes})


@pytest.fixture(name="apart", autouse=True)
def apart_fixture(monkeypatch):
  """Two processes, each with a directory of its own."""
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(own_checkpoints, "are_own", lambda directory: True)


def test_one_replica_a_process_needs_no_common_directory(tmp_path):
  assert running._has_own_directory(_config(), tmp_path)


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({"num_replicas": 4}, "mesh.num_replicas=4 on 2 processes: take one for"),
    ({"mesh": {"num_stages": 2}}, "mesh.num_stages=2: take 1"),
    ({"method": "allreduce", "sync_interval": None}, "sync.method='allreduce'"),
  ],
)
def test_what_needs_a_common_directory_is_one_line(tmp_path, changes, reason):
  with pytest.raises(UsageError, match="do not see one directory") as error:
    running._has_own_directory(_config(**changes), tmp_path)
  assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_process_alone_with_all_replicas_saves_as_ever(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 1)
  assert not running._has_own_directory(_config(), tmp_path)
  alone = _config(num_replicas=1)
  assert running._has_own_directory(alone, tmp_path)
