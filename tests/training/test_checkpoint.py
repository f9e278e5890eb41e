import contextlib
import itertools
import logging
import pathlib
import shutil
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.futures import future

from dilocox_jax.distributed import processes
from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.optimizers import named_optimizer
from dilocox_jax.outer.window import ReplicaState
from dilocox_jax.training.checkpoint import Checkpoints, RefusedError, SaveError
from tests import runs

WIDTH = 256
RECORD = {"position": {"step": 3}, "phase": "rounds", "loss": 0.1}


def _state(seed: int):
  """Everything a run's state is made of: chains, counts, Nones, nothing."""
  key = jax.random.key(seed)
  params = {
    "w": jax.random.normal(key, (8, WIDTH)),
    "blocks": [jnp.float32(seed), jnp.zeros((2, 1)), jnp.zeros((0, 3))],
  }
  schedule = optax.linear_schedule(1.0, 0.0, 9)
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), named_optimizer("adam", schedule)
  )
  moments = optimizer.init(params)
  gradients = jax.tree.map(jnp.ones_like, params)
  _, moments = optimizer.update(gradients, moments, params)
  half = params["w"].astype(jnp.bfloat16)
  return ReplicaState(params, (moments, None, half, jnp.int32(7 + seed)))


def _shapes(state):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )


def _template(record):
  del record
  return _shapes(_state(0))


@pytest.fixture(name="directory")
def directory_fixture(tmp_path) -> pathlib.Path:
  """Checkpoints of steps 3 and 6, two kinds of state apart."""
  checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
  for step in (3, 6):
    checkpoints.save(step, _state(step), RECORD | {"step": step})
  checkpoints.close()
  return tmp_path / "checkpoints"


def _restore(directory, template=_template):
  checkpoints = Checkpoints(directory)
  try:
    return checkpoints.restore(template)
  finally:
    checkpoints.close()


@pytest.mark.parametrize("reading", [1, 2, 3, 4, 6, 8])
def test_a_clock_that_jumps_by_a_day_in_a_save_ends_no_run(
  reading, tmp_path, monkeypatch
):
  calls = itertools.count()

  def jumping():
    return 1e9 + 86_400 * (next(calls) >= reading)

  monkeypatch.setattr(future, "time", SimpleNamespace(time=jumping))
  checkpoints = Checkpoints(tmp_path / "checkpoints")
  checkpoints.save(3, _state(3), RECORD)
  checkpoints.close()
  assert next(calls) > reading and _restore(tmp_path / "checkpoints")


def test_a_state_comes_back_bit_for_bit_with_its_record(directory):
  restored = _restore(directory)
  assert restored
  runs.assert_same_bits(restored[0], _state(6))
  assert restored[1] == RECORD | {"step": 6}


def test_values_that_are_not_finite_come_back_too(tmp_path):
  odd = np.asarray([np.nan, -0.0, np.inf, 1e-45], np.float32)
  checkpoints = Checkpoints(tmp_path / "checkpoints")
  state = {"odd": jnp.asarray(odd)}
  checkpoints.save(1, state, {})
  restored = checkpoints.restore(lambda record: _shapes(state))
  checkpoints.close()
  assert restored
  runs.assert_same_bits(restored[0], state)


def test_arrays_spread_over_devices_come_back_where_they_were(tmp_path):
  replicas = Replicas(8, "mesh")
  state = replicas.place((_state(1).params["w"], jnp.arange(5.0)), (0, None))
  checkpoints = Checkpoints(tmp_path / "checkpoints")
  checkpoints.save(1, state, {})
  restored = checkpoints.restore(lambda record: _shapes(state))
  checkpoints.close()
  assert restored
  runs.assert_same_bits(restored[0], state)
  spread, whole = restored[0]
  assert spread.sharding == NamedSharding(
    replicas.mesh, PartitionSpec("replica")
  )
  assert len(spread.addressable_shards) == 8
  assert whole.sharding.is_fully_replicated


@pytest.mark.parametrize("layout", ["stacked", "mesh"])
def test_a_save_holds_the_values_of_its_moment_though_they_are_donated(
  tmp_path, layout
):
  """The next round may use the memory up while the save is still writing."""
  replicas = Replicas(8, layout)
  advance = jax.jit(
    lambda tree: jax.tree.map(lambda x: 1.5 * x + 1.0, tree), donate_argnums=0
  )
  first = {"a": jnp.ones((8, 250_000)), "b": jnp.full((8, 250_000), -3.0)}
  state = replicas.place(jax.tree.map(lambda x: x * 1.0, first), 0)
  like = _shapes(state)
  expected = {}
  checkpoints = Checkpoints(tmp_path / "checkpoints", keep=9)
  for step in range(1, 5):
    # Sums would hide exchanged elements; these leaves are constant.
    expected[step] = [np.array(leaf[:, :1]) for leaf in jax.tree.leaves(state)]
    checkpoints.save(step, state, {"step": step})
    for _ in range(3):
      state = advance(state)
  checkpoints.close()
  for step in (4, 3, 2, 1):
    restored = _restore(tmp_path / "checkpoints", lambda record: like)
    assert restored and restored[1] == {"step": step}
    for leaf, value in zip(
      jax.tree.leaves(restored[0]), expected[step], strict=True
    ):
      np.testing.assert_array_equal(
        leaf, np.broadcast_to(value, leaf.shape), strict=True
      )
    shutil.rmtree(tmp_path / "checkpoints" / str(step))


def test_the_memory_of_a_saved_state_is_free_once_it_is_written(tmp_path):
  """Else every round after a save would run in twice the memory."""
  state = jnp.ones((1000, 1000))
  checkpoints = Checkpoints(tmp_path / "checkpoints")
  checkpoints.save(1, state, {})
  checkpoints.close()
  jax.jit(lambda x: x + 1.0, donate_argnums=0)(state)
  assert state.is_deleted()


def _largest(directory: pathlib.Path) -> pathlib.Path:
  files = [path for path in directory.rglob("*") if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def _truncate(step: pathlib.Path) -> None:
  file = _largest(step / "arrays")
  file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _flip(file: pathlib.Path, position: int) -> None:
  content = bytearray(file.read_bytes())
  content[position] ^= 1
  file.write_bytes(content)


def _flip_in_arrays(step: pathlib.Path) -> None:
  file = _largest(step / "arrays")
  _flip(file, file.stat().st_size // 2)


def _flip_in_record(step: pathlib.Path) -> None:
  file = step / "record" / "metadata"
  _flip(file, file.read_bytes().index(b"0.1") + 2)


def _flip_in_digests(step: pathlib.Path) -> None:
  file = step / "digests.json"
  _flip(file, file.read_bytes().index(b": ") + 3)


def _remove_digests(step: pathlib.Path) -> None:
  (step / "digests.json").unlink()


def _remove_arrays(step: pathlib.Path) -> None:
  shutil.rmtree(step / "arrays")


def _remove_file(step: pathlib.Path) -> None:
  _largest(step / "arrays").unlink()


def _remove_record(step: pathlib.Path) -> None:
  (step / "record" / "metadata").unlink()


def _empty(step: pathlib.Path) -> None:
  shutil.rmtree(step)
  step.mkdir()


DAMAGES = [
  _truncate,
  _flip_in_arrays,
  _flip_in_record,
  _flip_in_digests,
  _remove_digests,
  _remove_arrays,
  _remove_file,
  _remove_record,
  _empty,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(
  directory, damage, caplog
):
  damage(directory / "6")
  damaged = runs.files(directory / "6")
  with caplog.at_level(logging.WARNING, "dilocox_jax"):
    restored = _restore(directory)
  assert restored
  runs.assert_same_bits(restored[0], _state(3))
  assert restored[1] == RECORD | {"step": 3}
  aside = directory.parent / "broken_checkpoints" / "6"
  (message,) = [r.getMessage() for r in caplog.records if "dilocox" in r.name]
  assert "broken checkpoint of step 6" in message and str(aside) in message
  assert "\n" not in message
  assert runs.files(aside) == damaged


@pytest.mark.parametrize("position", range(50, 1000, 100))
@pytest.mark.slow
def test_no_flipped_bit_of_the_arrays_goes_unseen(directory, position):
  file = _largest(directory / "6" / "arrays")
  _flip(file, position * file.stat().st_size // 1000)
  restored = _restore(directory)
  assert restored
  runs.assert_same_bits(restored[0], _state(restored[1]["step"]))


def test_a_step_set_aside_can_be_saved_again(directory):
  _truncate(directory / "6")
  checkpoints = Checkpoints(directory)
  checkpoints.restore(_template)
  checkpoints.save(6, _state(9), {"again": True})
  checkpoints.close()
  restored = _restore(directory)
  assert restored and restored[1] == {"again": True}
  runs.assert_same_bits(restored[0], _state(9))


def test_the_half_of_a_killed_save_is_ignored_and_removed(directory):
  partial = directory / "9.orbax-checkpoint-tmp-1"
  shutil.copytree(directory / "6", partial)
  Checkpoints(directory, read_only=True).close()
  assert partial.exists()  # Another process may still be writing it.
  restored = _restore(directory)
  assert restored and restored[1]["step"] == 6
  assert not partial.exists()


def test_if_all_are_broken_nothing_is_begun_anew_or_moved(directory):
  """The disk may bring them back; a new run would cut all rows of this one."""
  for step in (3, 6):
    _truncate(directory / str(step))
  before = runs.files(directory.parent)
  with pytest.raises(RefusedError, match="all checkpoints in .* are damaged"):
    _restore(directory)
  assert runs.files(directory.parent) == before
  other = Checkpoints(directory, read_only=True)
  assert other.restore(_template) is None
  other.close()


def test_an_empty_directory_has_nothing_to_restore(tmp_path):
  assert _restore(tmp_path / "checkpoints") is None


def test_a_broken_one_of_another_run_is_passed_over_where_it_lies(
  directory, caplog
):
  _truncate(directory / "6")
  before = runs.files(directory.parent)
  checkpoints = Checkpoints(directory, read_only=True)
  restored = checkpoints.restore(_template)
  checkpoints.close()
  assert restored and restored[1]["step"] == 3
  assert "broken checkpoint of step 6" in caplog.text
  assert runs.files(directory.parent) == before


@pytest.mark.parametrize("error", [RefusedError, NameError])
def test_a_checkpoint_that_its_reader_refuses_is_not_called_broken(
  directory, error
):
  """What the caller raises says nothing about the files."""
  before = runs.files(directory.parent)

  def refuse(record):
    raise error(f"not step {record['step']}")

  with pytest.raises(error, match="not step 6"):
    _restore(directory, refuse)
  assert runs.files(directory.parent) == before


def _fill_disk(monkeypatch, free_bytes):
  usage = shutil.disk_usage("/")._replace(free=free_bytes)
  monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def test_a_save_without_room_is_refused_and_those_before_it_stay(
  directory, monkeypatch
):
  state = _state(9)
  size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
  checkpoints = Checkpoints(directory)
  # Orbax writes more than the arrays, so their size is not enough.
  needed_bytes = round(1.02 * size) + 1_000_000
  _fill_disk(monkeypatch, needed_bytes - 1)
  with pytest.raises(SaveError, match=r"^cannot save .* MB free; the check"):
    checkpoints.save(9, state, RECORD)
  _fill_disk(monkeypatch, needed_bytes)
  checkpoints.save(12, state, RECORD)
  checkpoints.close()
  assert sorted(path.name for path in directory.iterdir()) == ["12", "6"]


def test_processes_together_need_room_on_the_fullest_of_their_disks(
  directory, monkeypatch
):
  checkpoints = Checkpoints(directory)
  for told, is_refused in (
    ([[6e6, 12.22e6], [5e6, 20e6]], False),
    ([[6e6, 12.22e6], [5.1e6, 20e6]], True),
    ([[6e6, 20e6], [5.1e6, 12.22e6]], True),
  ):
    monkeypatch.setattr(processes, "from_all", lambda *_, told=told: told)
    context = contextlib.nullcontext()
    if is_refused:
      context = pytest.raises(OSError, match="are needed and 12.2 MB free")
    with context:
      checkpoints._check_room(_state(1))


def test_what_the_disk_refuses_in_the_background_is_said_in_one_line(tmp_path):
  checkpoints = Checkpoints(tmp_path / "checkpoints")

  def refuse():
    raise OSError(5, "Input/output error\nand more")

  checkpoints._manager.wait_until_finished = refuse
  for call in (checkpoints.close, lambda: checkpoints.save(1, _state(1), {})):
    with pytest.raises(SaveError, match=r"Input/output error; no ch") as e:
      call()
    assert "\n" not in str(e.value)


def test_what_is_no_error_of_the_disk_is_not_called_one(tmp_path):
  checkpoints = Checkpoints(tmp_path / "checkpoints")

  def fail():
    raise ValueError("a bug")

  checkpoints._manager.wait_until_finished = fail
  with pytest.raises(ValueError, match="^a bug$") as error:
    checkpoints.close()
  assert not isinstance(error.value, OSError)


SAVE_ON_A_FULL_DISK = """
import pathlib, sys
import jax
from dilocox_jax.training.checkpoint import Checkpoints, SaveError

checkpoints = Checkpoints(pathlib.Path(sys.argv[1]) / "checkpoints")
checkpoints._check_room = lambda state: None  # Another process was faster.
state = jax.random.normal(jax.random.key(0), (1000, 1000))
try:
  checkpoints.save(1, state, {})
  checkpoints.close()
except SaveError as error:
  print(f"error: {error}", file=sys.stderr)
"""


def test_a_disk_that_fills_up_during_a_save_is_one_line(tmp_path):
  mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
  if not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
    pytest.skip("this user may not mount a small disk")
  try:
    done = subprocess.run(
      [sys.executable, "-c", SAVE_ON_A_FULL_DISK, str(tmp_path)],
      capture_output=True,
      text=True,
      check=True,
    )
  finally:
    subprocess.run(["umount", str(tmp_path)], check=True)
  line, *more = done.stderr.splitlines()
  assert not more, done.stderr
  assert "No space left on device; no checkpoint was saved yet" in line


@pytest.mark.parametrize("keep", [1, 3])
def test_only_the_newest_are_kept(tmp_path, keep):
  checkpoints = Checkpoints(tmp_path / "checkpoints", keep=keep)
  for step in (2, 4, 6, 8):
    checkpoints.save(step, _state(step), {})
  checkpoints.close()
  names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
  assert names == ["2", "4", "6", "8"][-keep:]


def test_a_whole_checkpoint_of_another_shape_is_refused_not_dropped(directory):
  before = runs.files(directory.parent)

  def another(record):
    return _shapes({"w": jnp.zeros(3), "more": _template(record)})

  with pytest.raises(RefusedError, match="step 6 .* does not fit") as error:
    _restore(directory, another)
  assert "hand in the same model and optimizers" in str(error.value)
  assert "\n" not in str(error.value)
  assert runs.files(directory.parent) == before


def test_ten_thousand_leaves_keep_their_order(tmp_path):
  # By name number 10000 comes before number 1001.
  like = [np.float32(0)] * 10_002

  with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
    checkpoints._item = lambda step, name, args: {
      name: number for number, name in enumerate(args.item)
    }
    assert checkpoints._state(3, like) == list(range(10_002))
