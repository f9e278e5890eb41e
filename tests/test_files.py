import os

import pytest

from dilocox_jax import files


@pytest.fixture(name="others")
def others_fixture(tmp_path):
  """Another's file, and a directory of ours in which links point to it."""
  precious = tmp_path / "precious"
  precious.write_text("kept")
  ours = tmp_path / "ours"
  ours.mkdir()
  for name in ("file", f".file.{os.getpid()}.partial"):
    (ours / name).symlink_to(precious)
  return precious, ours


def test_a_link_is_replaced_and_not_followed(others):
  precious, ours = others
  with files.replaced(ours / "file") as file:
    file.write(b"new")
  assert precious.read_text() == "kept"
  assert [each.name for each in ours.iterdir()] == ["file"]
  assert (ours / "file").read_text() == "new"
  assert not (ours / "file").is_symlink()


def test_a_link_is_not_opened_to_append(others):
  precious, ours = others
  with pytest.raises(OSError) as found:
    files.opened_to_append(ours / "file")
  assert found.value.strerror == "it is a symbolic link"
  assert precious.read_text() == "kept"


def test_a_directory_may_be_a_link(tmp_path, others):
  _, ours = others
  (tmp_path / "link").symlink_to(ours)
  with files.replaced(tmp_path / "link" / "new") as file:
    file.write(b"a")
  with files.opened_to_append(tmp_path / "link" / "new") as file:
    file.write(b"b")
  assert (ours / "new").read_text() == "ab"


def test_what_fails_half_way_leaves_the_old_file_alone(tmp_path):
  (tmp_path / "file").write_text("old")
  with pytest.raises(ZeroDivisionError):
    with files.replaced(tmp_path / "file") as file:
      file.write(b"new")
      file.write(bytes(1 // 0))
  assert [each.name for each in tmp_path.iterdir()] == ["file"]
  assert (tmp_path / "file").read_text() == "old"
