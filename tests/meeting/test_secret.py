import pytest

from dilocox_jax.meeting.secret import read_secret, write_secret


def test_only_the_owner_can_read_a_new_secret(tmp_path):
  file = tmp_path / "folder" / "secret"
  write_secret(file)
  assert file.stat().st_mode & 0o777 == 0o600
  assert len(read_secret(file)) == 64


def test_two_secrets_differ(tmp_path):
  write_secret(tmp_path / "a")
  write_secret(tmp_path / "b")
  assert read_secret(tmp_path / "a") != read_secret(tmp_path / "b")


def test_a_secret_is_not_replaced(tmp_path):
  (tmp_path / "a").symlink_to(tmp_path / "missing")
  with pytest.raises(ValueError, match="exists"):
    write_secret(tmp_path / "a")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_secret_that_others_may_read_is_refused(tmp_path, mode):
  write_secret(tmp_path / "a")
  (tmp_path / "a").chmod(mode)
  with pytest.raises(ValueError, match="chmod 600"):
    read_secret(tmp_path / "a")


def test_a_short_secret_is_refused(tmp_path):
  (tmp_path / "a").write_text("password\n")
  (tmp_path / "a").chmod(0o600)
  with pytest.raises(ValueError, match="make_secret"):
    read_secret(tmp_path / "a")
