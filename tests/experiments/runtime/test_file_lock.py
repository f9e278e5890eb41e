"""One at a time."""

import pytest

from experiments.runtime import file_lock
from experiments.runtime.command_line import TRY_AGAIN, StoppedError, UsageError


def test_a_second_holder_may_try_again_later(tmp_path):
  path = tmp_path / "made" / "lock"
  with file_lock.held(path, "mine"):
    with pytest.raises(StoppedError, match="^mine$") as refused:
      with file_lock.held(path, "mine"):
        raise AssertionError("both had it")
    assert refused.value.exit_code == TRY_AGAIN
  with file_lock.held(path, "mine"):
    pass  # Let go with the block.


def test_a_lock_that_is_a_link_leaves_its_target_alone(tmp_path):
  (tmp_path / "thesis").write_text("precious")
  (tmp_path / "lock").symlink_to(tmp_path / "thesis")
  with pytest.raises(UsageError, match="lock cannot be .*symbolic link$"):
    with file_lock.held(tmp_path / "lock", ""):
      pass
  assert (tmp_path / "thesis").read_text() == "precious"


def test_where_no_file_can_be_the_reason_is_one_line(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(UsageError, match="lock cannot be written: "):
    with file_lock.held(tmp_path / "file" / "lock", ""):
      pass
