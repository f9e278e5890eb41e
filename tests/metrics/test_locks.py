import errno
import fcntl
import logging

from dilocox_jax.metrics.locks import try_lock


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
  assert "lock cannot be locked (No locks available)" in caplog.text
