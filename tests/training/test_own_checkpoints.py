"""Two real processes share nothing; the rest is a process that is alone.

tests/experiments/test_rendezvous.py has whole runs.
"""

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

import dilocox_jax as dx
from dilocox_jax.training import own_checkpoints, start
from dilocox_jax.training.checkpoint import RefusedError, saved_steps
from dilocox_jax.training.own_checkpoints import OwnCheckpoints
from experiments.runtime.distributed_flags import free_port
from tests import runs

# Each process asserts; `expect` is what both must find.
GROUP = """
import pathlib, shutil, sys
import jax, jax.numpy as jnp, numpy as np
from dilocox_jax.distributed import coordinator_store, processes
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.training import own_checkpoints
from dilocox_jax.training.checkpoint import RefusedError
from dilocox_jax.training.own_checkpoints import OwnCheckpoints

root, address, own = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
processes.start(address, 2, own)
directory = root / str(own)
directory.mkdir()
assert own_checkpoints.are_own(directory)
assert not own_checkpoints.are_own(root)
replicas = Replicas(2, "mesh")
odd = np.asarray([np.nan, -0.0, np.inf, 1e-45], np.float32)

def state(step):
  rows = np.stack([odd + step, -odd]).astype(jnp.bfloat16)
  shared = np.arange(step, step + 4, dtype=np.int8)
  return replicas.place((rows, shared, odd, np.float32(-0.0)), (0, *[None] * 3))

like = replicas.abstract(state(0), (0, *[None] * 3))

def opened(replica=own):
  return OwnCheckpoints(directory / "checkpoints", 2, replica)

def restored(replica=own):
  checkpoints = opened(replica)
  try:
    return checkpoints.restore(lambda record: like)
  finally:
    checkpoints.close()

def bits(tree):
  leaves = jax.tree.leaves(tree)
  parts = [np.array(leaf.addressable_shards[0].data) for leaf in leaves]
  return [(x.dtype.name, x.shape, x.tobytes()) for x in parts]

def begin():
  checkpoints = opened()
  assert checkpoints.restore(lambda record: like) is None
  for step in (3, 6, 9):
    checkpoints.save(step, state(step), {"step": step})
  checkpoints.close()

begin()
found, record = restored()
assert bits(found) == bits(state(9)) and record["step"] == 9
assert record["origins"] == [0, 1]

# A part that is damaged costs everyone that save.
if own:
  file = directory / "checkpoints/9/arrays/arrays.npz"
  file.write_bytes(file.read_bytes()[:-9])
found, record = restored()
assert bits(found) == bits(state(6)) and record["step"] == 6
assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == ["6"]
assert (directory / "broken_checkpoints/9").is_dir()

# Replicas go with their directories, whatever the numbers of the processes.
devices = own_checkpoints.devices(directory)
assert [device.process_index for device in devices] == [0, 1]
found, record = restored(1 - own)
assert record["origins"] == [1, 0]

# A directory that is gone costs nothing.
if own == 0:
  shutil.rmtree(directory)
  directory.mkdir()
else:
  (directory / "metrics.jsonl").write_text("a row")
devices = own_checkpoints.devices(directory)
assert [device.process_index for device in devices] == [1, 0]
found, record = restored()
assert record["origins"] == [None, 1] and record["step"] == 6
rows, *shared = bits(found)
assert shared == bits(state(6))[1:]
assert rows[2] == np.asarray(-odd, jnp.bfloat16).tobytes()
assert (directory / "metrics.jsonl").read_text() == "a row"

# All are damaged: nothing is begun anew or moved.
for file in directory.glob("checkpoints/*/arrays/arrays.npz"):
  file.write_bytes(b"")
before = sorted(directory.rglob("*"))
try:
  restored()
  raise AssertionError
except RefusedError as error:
  assert "all checkpoints of all processes are damaged" in str(error)
assert sorted(directory.rglob("*")) == before
coordinator_store.wait_for_end()  # It ends with process 0.
processes.exit_now(0)
"""


def test_two_processes_without_a_common_directory(tmp_path):
  address = f"127.0.0.1:{free_port()}"
  group = [
    subprocess.Popen(
      [sys.executable, "-c", GROUP, str(tmp_path), address, str(own)],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for own in range(2)
  ]
  try:
    for process in group:
      _, errors = process.communicate(timeout=300)
      assert process.returncode == 0, errors
  finally:
    for process in group:
      process.kill()
      with process:  # Closes its pipes and waits.
        pass


def _alone(workdir, until=None):
  """A process of an elastic run that nobody has joined."""
  config = runs.settings(num_replicas=1, layout="mesh", method="diloco")
  return runs.train(config, workdir, until=until, has_own_directory=True)


@pytest.fixture(scope="module", name="alone")
def alone_fixture(tmp_path_factory):
  """Such a run that was killed after its checkpoint of step 12."""
  workdir = tmp_path_factory.mktemp("alone")
  _alone(workdir, until=12)
  return workdir


def test_a_process_alone_goes_on_to_the_same_bits(alone, tmp_path):
  shutil.copytree(alone, tmp_path / "cut")
  _alone(tmp_path / "cut")
  _alone(tmp_path / "whole")
  cut, whole = tmp_path / "cut", tmp_path / "whole"
  assert runs.metrics_text(cut) == runs.metrics_text(whole)
  files = [each / "checkpoints/22/arrays/arrays.npz" for each in (cut, whole)]
  with np.load(files[0]) as one, np.load(files[1]) as other:
    runs.assert_same_bits(dict(one), dict(other))


def test_processes_that_share_a_directory_read_what_one_alone_saved(
  alone, tmp_path
):
  shutil.copytree(alone, tmp_path, dirs_exist_ok=True)
  before = jax.device_get(start.saved_outer_params(tmp_path))
  assert own_checkpoints.are_own(tmp_path)
  runs.train(runs.settings(num_replicas=2, method="diloco"), tmp_path, until=18)
  counts = [
    len(row["loss_per_replica"]) for row in runs.rows(tmp_path, "round")
  ]
  assert counts == [1] * 4 + [2] * 2
  assert not own_checkpoints.are_own(tmp_path)  # The newest one is theirs.
  after = jax.device_get(start.saved_outer_params(tmp_path))
  assert jax.tree.structure(before) == jax.tree.structure(after)


def test_one_of_several_parts_is_no_run_for_a_common_directory(alone, tmp_path):
  shutil.copytree(alone, tmp_path, dirs_exist_ok=True)
  shutil.rmtree(tmp_path / "checkpoints/6")
  folder = tmp_path / "checkpoints/12"
  file = folder / "record/metadata"
  record = json.loads(file.read_text())
  record["part"]["members"] *= 2
  file.write_text(json.dumps(record))
  digests = json.loads((folder / "digests.json").read_text())
  (folder / "digests.json").write_text(
    json.dumps({k: v for k, v in digests.items() if "record" not in k})
  )
  with pytest.raises(RefusedError, match="replica 0 of 2, whose processes"):
    runs.train(runs.settings(num_replicas=2, method="diloco"), tmp_path)


def test_checkpoints_of_a_common_directory_are_refused(stopped, tmp_path):
  shutil.copytree(stopped.workdir, tmp_path, dirs_exist_ok=True)
  assert not own_checkpoints.are_own(tmp_path)
  before = runs.files(tmp_path)
  checkpoints = OwnCheckpoints(tmp_path / "checkpoints", 2, 0)
  with pytest.raises(RefusedError, match="share a directory: give all"):
    checkpoints.restore(lambda record: None)
  checkpoints.close()
  assert runs.files(tmp_path) == before


@pytest.mark.parametrize("replica, kept", [(0, [12, 18]), (None, [18])])
def test_a_process_that_keeps_one_save_keeps_the_one_before_too(
  replica, kept, tmp_path
):
  # The other one may be killed in its save of step 18, and has only step 12.
  config = runs.settings(
    num_replicas=1,
    layout="mesh",
    method="diloco",
    checkpoint={"keep": 1},
  )
  has_own = replica is not None
  runs.train(config, tmp_path, until=18, has_own_directory=has_own)
  assert sorted(saved_steps(tmp_path / "checkpoints")) == kept


def test_the_average_of_a_part_is_read_on_its_own(tmp_path):
  config = runs.settings(
    num_replicas=1,
    layout="mesh",
    method="overlap_loco",
    num_fragments=3,
    outer={"average_power": 4.0},
  )
  runs.train(config, tmp_path, until=12, has_own_directory=True)
  expected = dx.load(tmp_path).params
  # The group has grown by now, as `config.json` of each member says.
  path = tmp_path / "config.json"
  values = json.loads(path.read_text())
  values["mesh"]["num_replicas"] = 2
  path.write_text(json.dumps(values))
  runs.assert_same_bits(dx.load(tmp_path).params, expected)


def test_who_has_saved_waits_for_the_others(tmp_path, monkeypatch):
  met = []
  monkeypatch.setattr(
    own_checkpoints.processes, "meet", lambda: met.append(True)
  )
  OwnCheckpoints(tmp_path / "checkpoints", 2, 0).wait()
  assert met


def test_records_may_be_copied_in_part(alone, tmp_path):
  # A new process that is killed while it copies must be able to begin again.
  config = runs.settings(num_replicas=1, layout="mesh", method="diloco")
  digest = json.loads((alone / "run.json").read_text())["corpus_digest"]
  (tmp_path / "checkpoints").mkdir()
  for name in own_checkpoints._COPIED:
    shutil.copy(alone / name, tmp_path)
    assert start._lost_run(config, tmp_path, digest, is_saved=True) == ""
