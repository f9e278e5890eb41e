import pytest

from dilocox_jax.meeting import paths


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "a.b", "x" * 33, "-a"])
def test_a_name_that_could_be_another_path_is_refused(name):
  with pytest.raises(ValueError, match="must be 1 to 32"):
    paths.checked_name(name)


def test_paths_sort_by_event_and_give_it_back():
  made = [
    paths.message_path(12, 1, "oslo"),
    paths.manifest_path(12, 1),
    paths.snapshot_path(12, "index"),
  ]
  assert [paths.event_of(path) for path in made] == [12, 12, 12]
  assert paths.event_of(paths.seat_path(3)) == -1
  assert paths.event_of(paths.RUN) == -1
  assert paths.manifest_path(9, 0) < paths.manifest_path(10, 0)
