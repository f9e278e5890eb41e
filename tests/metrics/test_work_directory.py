import concurrent.futures

import pytest

from dilocox_jax.metrics.work_directory import (
  STAMP,
  RefusedDirectoryError,
  claim,
)
from tests import runs


def test_a_directory_stays_with_the_program_that_made_it(tmp_path):
  folder = claim(tmp_path / "made" / "here", "advise")
  (folder / "report.md").write_text("mine")
  before = runs.files(folder)
  assert claim(folder, "advise") == folder
  with pytest.raises(RefusedDirectoryError, match="advise, and simulate would"):
    claim(folder, "simulate")
  assert runs.files(folder) == before


@pytest.mark.parametrize(
  "content", [None, "", "[]", '"advise"', "{}", '{"program": "advise"']
)
def test_files_without_a_whole_stamp_are_a_users(tmp_path, content):
  (tmp_path / "notes.txt").write_text("mine")
  if content is not None:
    (tmp_path / STAMP).write_text(content)
  before = runs.files(tmp_path)
  with pytest.raises(RefusedDirectoryError, match="advise did not make"):
    claim(tmp_path, "advise")
  assert runs.files(tmp_path) == before


def test_a_stamp_that_leads_elsewhere_is_not_written_through(tmp_path):
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / STAMP).symlink_to(tmp_path / "elsewhere")
  with pytest.raises(RefusedDirectoryError):
    claim(tmp_path / "run", "advise")
  assert not (tmp_path / "elsewhere").exists()


def test_a_name_that_is_not_utf_8_is_refused_before_it_is_made(tmp_path):
  with pytest.raises(RefusedDirectoryError, match="not named in UTF-8"):
    claim(tmp_path / "caf\udce9" / "run", "train")
  assert not list(tmp_path.iterdir())


def test_a_directory_with_hidden_files_only_is_empty(tmp_path):
  (tmp_path / ".DS_Store").touch()
  claim(tmp_path, "advise")
  assert (tmp_path / STAMP).exists()


def test_processes_of_one_program_claim_it_together(tmp_path):
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    for number in range(20):
      folder = tmp_path / str(number)
      tried = [pool.submit(claim, folder, "train") for _ in range(8)]
      assert {each.result() for each in tried} == {folder}
      assert [path.name for path in folder.iterdir()] == [STAMP]
