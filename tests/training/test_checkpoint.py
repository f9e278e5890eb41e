"""States come back bit for bit, and damage or a full disk loses nothing."""

import functools
import logging
import pathlib
import shutil
import subprocess
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dilocox_jax.distributed.replicas import Replicas
from dilocox_jax.optimizers import named_optimizer
from dilocox_jax.rounds.window import ReplicaState
from dilocox_jax.training.checkpoint import (
  Checkpoints,
  RefusedError,
  SaveError,
  saved_steps,
)
from tests import runs

RECORD = {"position": {"step": 3}, "phase": "rounds", "loss": 0.1}


@functools.cache
def state_of(seed):
  """Everything a run's state is made of: chains, counts, Nones, odd values."""
  params = {
    "w": jax.random.normal(jax.random.key(seed), (8, 256)),
    "blocks": [jnp.float32(seed), jnp.zeros((2, 1)), jnp.zeros((0, 3))],
    "odd": jnp.asarray([np.nan, -0.0, np.inf, 1e-45], jnp.float32),
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


def shapes(state):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )


def template(record):
  del record
  return shapes(state_of(0))


@pytest.fixture(scope="module", name="made")
def made_fixture(tmp_path_factory):
  """Checkpoints of steps 3 and 6, two kinds of state apart."""
  folder = tmp_path_factory.mktemp("made") / "checkpoints"
  checkpoints = Checkpoints(folder, keep=2)
  for step in (1, 3, 6):  # The first of three is not kept.
    checkpoints.save(step, state_of(step), RECORD | {"step": step})
  checkpoints.close()
  return folder


@pytest.fixture(name="directory")
def directory_fixture(made, tmp_path):
  """A copy of them, to be damaged."""
  return shutil.copytree(made, tmp_path / "checkpoints")


def restore(directory, template=template, **options) -> Any:
  checkpoints = Checkpoints(directory, **options)
  try:
    return checkpoints.restore(template)
  finally:
    checkpoints.close()


def test_the_newest_comes_back_bit_for_bit_with_its_record(directory):
  state, record = restore(directory)
  runs.assert_same_bits(state, state_of(6))
  assert record == RECORD | {"step": 6}
  assert sorted(path.name for path in directory.iterdir()) == ["3", "6"]
  assert restore(directory.parent / "none") is None


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
  like = shapes(state)
  expected = {}
  checkpoints = Checkpoints(tmp_path / "checkpoints", keep=9)
  for step in range(1, 4):
    # Sums would hide exchanged elements; these leaves are constant.
    expected[step] = [np.array(leaf[:, :1]) for leaf in jax.tree.leaves(state)]
    checkpoints.save(step, state, {"step": step})
    state = advance(advance(state))
  checkpoints.save(4, state, {})
  checkpoints.close()
  del state, first  # What is written is held no longer.
  assert not [x for x in jax.live_arrays() if x.shape == (8, 250_000)]
  shutil.rmtree(tmp_path / "checkpoints" / "4")
  for step in (3, 2, 1):
    found, record = restore(tmp_path / "checkpoints", lambda record: like)
    assert record == {"step": step}
    for leaf, value in zip(jax.tree.leaves(found), expected[step], strict=True):
      np.testing.assert_array_equal(leaf, np.broadcast_to(value, leaf.shape))
      assert len(leaf.addressable_shards) == (8 if layout == "mesh" else 1)
    shutil.rmtree(tmp_path / "checkpoints" / str(step))


def largest(directory: pathlib.Path) -> pathlib.Path:
  files = [path for path in directory.rglob("*") if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def flip(file: pathlib.Path, position: int) -> None:
  content = bytearray(file.read_bytes())
  content[position] ^= 1
  file.write_bytes(content)


def truncate(step):
  file = largest(step / "arrays")
  file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGES = {
  "truncated": truncate,
  "a bit of the arrays": lambda step: flip(largest(step / "arrays"), 99),
  "a bit of the record": lambda step: flip(step / "record" / "metadata", 9),
  "no digests": lambda step: (step / "digests.json").unlink(),
  "other digests": lambda step: (step / "digests.json").write_text("[" * 10**5),
  "empty digests": lambda step: (step / "digests.json").write_text("{}"),
  "no files": lambda step: (step / "digests.json").write_text(
    '{"step": 6, "files": {}}'
  ),
  "a file is gone": lambda step: largest(step / "arrays").unlink(),
  "a file more": lambda step: (step / "arrays" / "more").write_text("x"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(
  directory, damage, caplog
):
  DAMAGES[damage](directory / "6")
  damaged = runs.files(directory / "6")
  before = runs.files(directory.parent)
  assert restore(directory, read_only=True)[1]["step"] == 3
  assert runs.files(directory.parent) == before  # Another run's: not moved.
  caplog.clear()
  with caplog.at_level(logging.WARNING, "dilocox_jax"):
    state, record = restore(directory)
  runs.assert_same_bits(state, state_of(3))
  assert record == RECORD | {"step": 3}
  aside = directory.parent / "broken_checkpoints" / "6"
  (message,) = [r.getMessage() for r in caplog.records if "dilocox" in r.name]
  assert "step 6" in message and str(aside) in message and "\n" not in message
  assert runs.files(aside) == damaged
  checkpoints = Checkpoints(directory)
  checkpoints.save(6, state_of(9), {"again": True})
  checkpoints.close()
  assert restore(directory)[1] == {"again": True}


def test_the_half_of_a_killed_save_is_ignored_and_removed(directory):
  partial = directory / "9.orbax-checkpoint-tmp-1"
  shutil.copytree(directory / "6", partial)
  Checkpoints(directory, read_only=True).close()
  assert partial.exists()  # Another process may still be writing it.
  assert restore(directory)[1]["step"] == 6
  deadline = time.monotonic() + 600
  while partial.exists() and time.monotonic() < deadline:
    time.sleep(0.01)  # A thread removes it.
  assert not partial.exists()


STRANGERS = {
  "a file called 12": lambda folder: (folder / "12").write_text("x"),
  "a number of others": lambda folder: (folder / "\u00b2").mkdir(),
  "zeros in front": lambda folder: shutil.copytree(
    folder / "6", folder / "012"
  ),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_what_is_no_checkpoint_is_left_alone(directory, stranger):
  STRANGERS[stranger](directory)
  before = runs.files(directory)
  assert saved_steps(directory) == [3, 6]
  assert restore(directory)[1]["step"] == 6
  assert runs.files(directory) == before


def test_a_copy_under_another_number_is_passed_over(directory, caplog):
  """It would be taken for a later state, and hide all that follow."""
  shutil.copytree(directory / "3", directory / "99")
  assert restore(directory)[1]["step"] == 6
  assert "it is a copy of that of step 3" in caplog.text
  assert saved_steps(directory) == [3, 6]


def refuse(record):
  raise RefusedError(f"not step {record['step']}")


def another_shape(record):
  return shapes({"w": jnp.zeros(3), "more": template(record)})


@pytest.mark.parametrize(
  ("read", "says"),
  [(refuse, "^not step 6$"), (another_shape, "step 6 .* does not fit")],
)
def test_a_whole_checkpoint_that_its_reader_refuses_is_not_moved(
  directory, read, says
):
  before = runs.files(directory.parent)
  with pytest.raises(RefusedError, match=says) as error:
    restore(directory, read)
  assert "\n" not in str(error.value)
  assert runs.files(directory.parent) == before


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/9"])
@pytest.mark.parametrize("is_running", [False, True])
def test_a_link_where_checkpoints_are_written_is_refused(
  directory, name, is_running, tmp_path
):
  victim = tmp_path / "victim"
  shutil.copytree(directory, victim)
  before = runs.files(victim)
  checkpoints = Checkpoints(directory)
  if not is_running:
    checkpoints.close()
  link = directory.parent / name
  if name == "checkpoints":
    link.rename(directory.parent / "moved")
  link.symlink_to(victim)
  with pytest.raises(RefusedError, match="is a symbolic link") as error:
    if is_running:
      checkpoints.save(9, state_of(9), {})
    else:
      Checkpoints(directory)
  assert "\n" not in str(error.value) and "--workdir" in str(error.value)
  assert runs.files(victim) == before
  # Where nothing is written links are followed.
  if name == "checkpoints":
    assert restore(directory, read_only=True)[1]["step"] == 6


def test_broken_checkpoints_are_not_moved_behind_a_link(directory, tmp_path):
  truncate(directory / "6")
  victim = tmp_path / "victim"
  (victim / "6").mkdir(parents=True)
  (victim / "6" / "thesis").write_text("precious")
  (directory.parent / "broken_checkpoints").symlink_to(victim)
  says = "broken_checkpoints cannot be written: .* is a symbolic link"
  with pytest.raises(RefusedError, match=says):
    restore(directory)
  assert runs.files(victim) == {"6/thesis": b"precious"}


def test_the_folder_above_checkpoints_may_be_a_link(tmp_path):
  (tmp_path / "disk").mkdir()
  (tmp_path / "run").symlink_to("disk")
  checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
  checkpoints.save(3, state_of(3), {"step": 3})
  checkpoints.close()
  assert (tmp_path / "disk" / "checkpoints" / "3").is_dir()


def test_digests_are_not_written_behind_a_link(directory, tmp_path):
  checkpoints = Checkpoints(directory)
  (tmp_path / "victim").mkdir()
  link = directory / "9.orbax-checkpoint-tmp-1"
  link.symlink_to(tmp_path / "victim")
  with pytest.raises(NotADirectoryError):
    checkpoints._write_digests()
  assert not runs.files(tmp_path / "victim")
  link.unlink()
  checkpoints.close()


def test_if_all_are_broken_nothing_is_begun_anew_or_moved(directory):
  """The disk may bring them back; a new run would cut all rows of this one."""
  for step in (3, 6):
    truncate(directory / str(step))
  before = runs.files(directory.parent)
  with pytest.raises(RefusedError, match="all checkpoints in .* are damaged"):
    restore(directory)
  assert restore(directory, read_only=True) is None
  assert runs.files(directory.parent) == before


def test_a_disk_that_fills_up_during_a_save_is_one_line(tmp_path, capfd):
  mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
  if not shutil.which("mount") or subprocess.run(mount, check=False).returncode:
    pytest.skip("this user may not mount a small disk")
  line = "^[^\n]*No space left on device; no checkpoint was saved yet[^\n]*$"
  checkpoints = Checkpoints(tmp_path / "checkpoints")
  try:
    with pytest.raises(SaveError, match=line):
      checkpoints.save(
        1, jax.random.normal(jax.random.key(0), (1000, 1000)), {}
      )
      checkpoints.close()
  finally:
    subprocess.run(["umount", str(tmp_path)], check=True)
  assert not capfd.readouterr().err


def test_a_bug_in_the_background_is_no_error_of_the_disk(tmp_path):
  def fail():
    raise RuntimeError("a thread failed") from error

  checkpoints = Checkpoints(tmp_path / "checkpoints")
  checkpoints._manager.wait_until_finished = fail
  error = ValueError("cannot write [os_error_code='28']")
  with pytest.raises(SaveError):
    checkpoints.close()
  error = ValueError("a bug")
  with pytest.raises(RuntimeError, match="a thread failed"):
    checkpoints.close()
