"""The page of the committed runs describes their tables and runs its lines."""

import doctest
import re

import pandas
import pytest

from experiments.configs import convergence, replicas
from experiments.sweeps.runs import baseline_of
from experiments.sweeps.tables import COMMITTED

PAGE = COMMITTED.with_name("README.md")
SWEEPS = {
  **{f"convergence_{name}": each for name, each in convergence.SWEEPS.items()},
  **{f"replicas_{name}": each for name, each in replicas.SWEEPS.items()},
}


def described(title):
  """Columns that a section of the page describes."""
  section = PAGE.read_text().split(f"## Columns of {title}\n")[1]
  table = section.split("\n## ")[0]
  first_cells = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
  return re.findall(r"`(.+?)`", " ".join(first_cells))


def test_the_lines_of_pandas_print_what_the_page_shows(monkeypatch):
  monkeypatch.chdir(PAGE.parents[2])
  outcome = doctest.testfile(str(PAGE), module_relative=False)
  assert outcome.attempted > 8 and not outcome.failed


@pytest.mark.parametrize("name", ["runs.csv", "evaluations.csv"])
def test_the_page_describes_each_column_that_has_a_plain_name(name):
  columns = pandas.read_csv(COMMITTED.with_name(name), nrows=1).columns
  plain = [column for column in columns if "." not in column]
  assert sorted(described(name)) == sorted(plain)


@pytest.mark.parametrize("study", SWEEPS)
def test_each_run_has_the_baseline_that_its_sweep_names(study):
  runs = pandas.read_csv(COMMITTED, keep_default_na=False)
  runs = runs[runs["study"] == study]
  settings = set(runs["setting"])
  wrong = []
  pairs = runs[["setting", "baseline"]].drop_duplicates()
  for setting, baseline in pairs.itertuples(index=False):
    expected = baseline_of(SWEEPS[study], setting)
    if expected == setting or expected not in settings:
      expected = ""
    if baseline != expected:
      wrong.append((setting, baseline, expected))
  assert len(settings) > 1 and not wrong
