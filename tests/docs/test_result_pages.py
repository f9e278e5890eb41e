"""The pages of the sweeps belong to the page of results, and stay current."""

import os

import pandas
import pytest

from docs import result_pages
from experiments.sweeps.tables import COMMITTED
from tests.docs.committed_runs import ROOT

RESULTS = (ROOT / "docs/results.md").read_text()
NAME = "replicas_main"


@pytest.mark.parametrize("name", result_pages.SWEEPS)
def test_the_page_of_results_links_every_sweep(name):
  assert f"<results/pages/{name}/index>" in RESULTS


@pytest.mark.parametrize("name", result_pages.SWEEPS)
def test_every_sweep_has_committed_rows(name):
  assert name in set(pandas.read_csv(COMMITTED)["study"])


@pytest.fixture(name="page")
def page_fixture(tmp_path, monkeypatch):
  """A repository with the rows, the config and the page of one sweep."""
  monkeypatch.setattr(result_pages, "ROOT", tmp_path)
  monkeypatch.setattr(result_pages, "PAGES", tmp_path / "pages")
  rows = tmp_path / "docs/results/runs.csv"
  evaluations = rows.with_name("evaluations.csv")
  config = tmp_path / "experiments/configs/replicas.py"
  page = tmp_path / "pages" / NAME / "index.md"
  written = ((rows, 1000), (evaluations, 1000), (config, 1000), (page, 2000))
  for path, time_s in written:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    os.utime(path, (time_s, time_s))
  return page


def test_a_page_that_is_newer_than_its_rows_is_kept(page):
  assert page.exists() and result_pages.is_current(NAME)


def test_a_page_is_written_anew_after_its_rows_have_changed(page):
  os.utime(page, (500, 500))
  assert not result_pages.is_current(NAME)


def test_a_page_that_is_missing_is_written(page):
  page.unlink()
  assert not result_pages.is_current(NAME)
