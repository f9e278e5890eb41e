import pytest

from dilocox_jax.training import digests


@pytest.fixture(name="checkpoint")
def checkpoint_fixture(tmp_path):
  """A folder of two files, sealed."""
  for name in ("arrays/d/data", "record/metadata"):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_bytes(name.encode())
  digests.seal(tmp_path)
  return tmp_path


def test_untouched_files_are_whole(checkpoint):
  assert digests.damage(checkpoint) == ""


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_file_that_changed_or_is_gone_is_named(checkpoint, is_deleted):
  path = checkpoint / "arrays/d/data"
  path.unlink() if is_deleted else path.write_bytes(b"arrays/d/dat_")
  assert digests.damage(checkpoint) == "arrays/d/data is damaged or missing"


def test_a_folder_without_digests_cannot_be_read(checkpoint):
  for text in ("null", "[" * 10**5):
    (checkpoint / digests.FILE).write_text(text)
    assert "cannot be read" in digests.damage(checkpoint)
  (checkpoint / digests.FILE).unlink()
  assert "cannot be read" in digests.damage(checkpoint)
