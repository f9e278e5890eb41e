import pytest

from dilocox_jax.distributed import processes
from dilocox_jax.metrics.work_directory import STAMP
from dilocox_jax.training import run_lock
from dilocox_jax.training.checkpoint import RefusedError


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path):
  workdir = tmp_path / "made" / "run"
  with run_lock.held(workdir):
    with pytest.raises(run_lock.BusyError, match="at work in workdir=.*run: "):
      with run_lock.held(workdir):
        raise AssertionError("both had it")
  with run_lock.held(workdir):
    assert {each.name for each in workdir.iterdir()} == {run_lock.LOCK, STAMP}


def test_a_process_that_writes_nothing_holds_no_lock(tmp_path, monkeypatch):
  monkeypatch.setattr(processes, "is_main", lambda: False)
  with run_lock.held(tmp_path):
    assert not list(tmp_path.iterdir())


def test_a_lock_that_is_a_link_leaves_its_target_alone(tmp_path):
  (tmp_path / "thesis").write_text("precious")
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / run_lock.LOCK).symlink_to(tmp_path / "thesis")
  with pytest.raises(RefusedError, match="lock cannot be .*symbolic link$"):
    with run_lock.held(tmp_path / "run"):
      pass
  assert (tmp_path / "thesis").read_text() == "precious"


def test_where_no_file_can_be_the_reason_is_one_line(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(RefusedError, match="lock cannot be written: "):
    with run_lock.held(tmp_path / "file" / "run"):
      pass
