"""Whose a work directory is, what was run in it, and who is at work."""

import concurrent.futures
import errno
import fcntl
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from dilocox_jax.metrics import work_directory
from dilocox_jax.metrics.work_directory import (
  LOCK,
  STAMP,
  BusyError,
  RefusedError,
  check_subfolder,
  claim,
  held,
  locked,
  write_run_record,
)
from tests import runs


@pytest.mark.parametrize(
  "content",
  [None, "", "[]", '"sweep"', "{}", '{"program": "sweep"', "[" * 100_000],
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


def test_a_stamp_that_is_a_pipe_is_not_waited_for(tmp_path):
  os.mkfifo(tmp_path / STAMP)
  with pytest.raises(RefusedError, match="did not make"):
    claim(tmp_path, "train")


def test_a_folder_in_a_work_directory_is_no_link(tmp_path):
  workdir = tmp_path / "run"
  assert check_subfolder(workdir, "profile") == workdir / "profile"
  (tmp_path / "victim" / "b").mkdir(parents=True)
  workdir.mkdir()
  (workdir / "a").symlink_to(tmp_path / "victim")
  for names in (["a"], ["a", "b"]):
    with pytest.raises(RefusedError, match="a is a symbolic link") as error:
      check_subfolder(workdir, *names)
    assert "\n" not in str(error.value)


def test_a_name_that_is_not_utf_8_is_refused_before_it_is_made(tmp_path):
  with pytest.raises(RefusedError, match="not named in UTF-8"):
    claim(tmp_path / "caf\udce9" / "run", "train")
  assert not list(tmp_path.iterdir())


def test_halves_of_files_that_a_killed_run_left_are_removed(tmp_path):
  with held(tmp_path):
    pass
  for name in (".report.md.123.partial", ".run.json.9.partial", ".hidden"):
    (tmp_path / name).write_text("half")
  with held(tmp_path):
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {LOCK, STAMP, ".hidden"}


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


HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_the_process_that_holds_a_lock_is_named(tmp_path):
  command = [sys.executable, "-c", HOLDS, tmp_path / "lock"]
  with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
    assert holder.stdout
    holder.stdout.readline()
    try:
      with pytest.raises(BusyError, match=rf"^busy \(process {holder.pid}\)$"):
        with locked(tmp_path / "lock", "busy"):
          pass
    finally:
      holder.kill()


def test_a_lock_that_cannot_be_is_one_line_and_harms_nothing(tmp_path):
  (tmp_path / "thesis").write_text("precious")
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / LOCK).symlink_to(tmp_path / "thesis")
  with pytest.raises(RefusedError, match="lock cannot be "):
    with held(tmp_path / "run"):
      pass
  for workdir in (tmp_path / "thesis", tmp_path / "thesis" / "run"):
    with pytest.raises(RefusedError, match=f"^{workdir} cannot be written: "):
      with held(workdir):
        pass
  assert (tmp_path / "thesis").read_text() == "precious"


def test_a_file_system_without_locks_gets_a_warning(
  tmp_path, monkeypatch, caplog
):
  def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")

  monkeypatch.setattr(fcntl, "flock", no_locks)
  with locked(tmp_path / "lock", ""):
    pass
  assert "No locks available" in caplog.text


RUN = {"method": "diloco", "num_replicas": 2, "corpus_digest": "9f3a"}


def written(workdir, platform="cpu x 2", continues=False, **start):
  config = {"seed": np.int64(3), "outer": {"betas": (0.9, 0.95)}}
  start |= {"platform": platform, "command": "python -m x"}
  write_run_record(workdir, config, RUN, start, continues)
  return json.loads((workdir / "run.json").read_text())


def test_a_continued_run_keeps_how_else_it_was_started(tmp_path):
  def started(platform, **changes):
    record = written(tmp_path, platform=platform, **changes)
    assert record["platform"] == platform
    return [start["platform"] for start in record["earlier_starts"]]

  assert started("cpu", continues=True) == []  # Nothing was there before.
  assert started("cpu", continues=True) == []
  assert started("gpu", continues=True) == ["cpu"]
  assert started("tpu", continues=True) == ["cpu", "gpu"]
  assert started("gpu", continues=True) == ["cpu", "tpu"]
  chosen = {"model.compute_dtype": "bfloat16"}
  record = written(tmp_path, "gpu", True, chosen_for_device=chosen)
  assert record["chosen_for_device"] == chosen
  assert record["earlier_starts"][-1]["chosen_for_device"] is None
  (tmp_path / "run.json").write_text("{")
  assert started("cpu", continues=True) == []
  assert started("gpu") == []  # A new run in an old directory.


@pytest.mark.parametrize("is_in_hook", [False, True])
def test_the_source_revision_is_the_commit_of_this_package(
  is_in_hook, tmp_path, monkeypatch
):
  monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
  (tmp_path / "nowhere").mkdir()

  def git(*arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(tmp_path), *who, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()

  def revision(source):
    source.parent.mkdir(parents=True, exist_ok=True)
    with monkeypatch.context() as patch:
      patch.setattr(work_directory, "__file__", str(source))
      if is_in_hook:  # Git tells its hooks so where they are at work.
        patch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
        patch.setenv("GIT_INDEX_FILE", str(tmp_path / "nowhere" / "index"))
      return work_directory.source_revision()

  source = tmp_path / "dilocox_jax" / "metrics" / "work_directory.py"
  assert revision(source) is None  # No checkout.
  source.write_text("")
  git("init", "-q")
  git("add", "-A")
  git("commit", "-q", "-m", "first")
  head = git("rev-parse", "HEAD")
  assert revision(source) == head
  source.write_text("# edited\n")
  assert revision(source) == f"{head}-dirty"
  # A copy that is installed in the checkout of another project.
  installed = tmp_path / "venv/site/dilocox_jax/metrics/work_directory.py"
  assert revision(installed) is None
