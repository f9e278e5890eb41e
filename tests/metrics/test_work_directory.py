"""Whose a work directory is, and who is at work in it."""

import concurrent.futures
import errno
import fcntl
import logging

import pytest

from dilocox_jax.metrics.work_directory import (
  LOCK,
  STAMP,
  BusyError,
  RefusedError,
  claim,
  held,
  try_lock,
)
from tests import runs


def test_a_directory_stays_with_the_program_that_made_it(tmp_path):
  (tmp_path / ".DS_Store").touch()  # Hidden files do not count.
  folder = claim(tmp_path, "sweep")
  (folder / "report.md").write_text("mine")
  before = runs.files(folder)
  assert claim(folder, "sweep") == folder
  with pytest.raises(RefusedError, match="sweep, and simulate would"):
    claim(folder, "simulate")
  assert runs.files(folder) == before


@pytest.mark.parametrize(
  "content", [None, "", "[]", '"sweep"', "{}", '{"program": "sweep"']
)
def test_files_without_a_whole_stamp_are_a_users(tmp_path, content):
  (tmp_path / "notes.txt").write_text("mine")
  if content is not None:
    (tmp_path / STAMP).write_text(content)
  before = runs.files(tmp_path)
  with pytest.raises(RefusedError, match="sweep did not make"):
    claim(tmp_path, "sweep")
  assert runs.files(tmp_path) == before


def test_a_stamp_that_leads_elsewhere_is_not_written_through(tmp_path):
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / STAMP).symlink_to(tmp_path / "elsewhere")
  with pytest.raises(RefusedError):
    claim(tmp_path / "run", "sweep")
  assert not (tmp_path / "elsewhere").exists()


def test_a_name_that_is_not_utf_8_is_refused_before_it_is_made(tmp_path):
  with pytest.raises(RefusedError, match="not named in UTF-8"):
    claim(tmp_path / "caf\udce9" / "run", "train")
  assert not list(tmp_path.iterdir())


def test_processes_of_one_program_claim_it_together(tmp_path):
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    for number in range(20):
      folder = tmp_path / "deep" / str(number)
      tried = [pool.submit(claim, folder, "train") for _ in range(8)]
      assert {each.result() for each in tried} == {folder}
      assert [path.name for path in folder.iterdir()] == [STAMP]


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path):
  workdir = tmp_path / "made" / "run"
  with held(workdir):
    with pytest.raises(BusyError, match="at work in workdir"):
      with held(workdir):
        raise AssertionError("both had it")
  with held(workdir):
    assert {each.name for each in workdir.iterdir()} == {LOCK, STAMP}


def test_a_lock_that_cannot_be_is_one_line_and_harms_nothing(tmp_path):
  (tmp_path / "thesis").write_text("precious")
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / LOCK).symlink_to(tmp_path / "thesis")
  for workdir in (tmp_path / "run", tmp_path / "thesis" / "run"):
    with pytest.raises(RefusedError, match="lock cannot be "):
      with held(workdir):
        pass
  assert (tmp_path / "thesis").read_text() == "precious"


def test_an_open_file_is_locked_until_it_is_closed(tmp_path):
  with (tmp_path / "lock").open("w") as mine:
    assert try_lock(mine)
    with (tmp_path / "lock").open("w") as theirs:
      assert not try_lock(theirs)
  with (tmp_path / "lock").open("w") as theirs:
    assert try_lock(theirs)


def test_a_file_system_without_locks_gets_a_warning(
  tmp_path, monkeypatch, caplog
):
  def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", no_locks)
  with (tmp_path / "lock").open("w") as file, caplog.at_level(logging.WARNING):
    assert try_lock(file)
  assert "No locks available" in caplog.text
