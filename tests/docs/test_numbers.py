"""The figures of the README and of the results are those of committed rows.

A page is divided into claims, phrases with all their figures. Most claims are
computed from rows; others are listed with the reason why there is no row. What
is left when all claims are taken out of a page must have no figure.
"""

import re

import pytest

from docs.figures import loss_by_time
from tests.docs import readme_claims, results_claims
from tests.docs.committed_runs import ROOT

PAGES = {
  "README.md": readme_claims,
  "docs/results.md": results_claims,
}
FIGURE = re.compile(r"(?<![\w.])\d[\d,.]*")


def one_line(text):
  return " ".join(text.split())


def read(path):
  text = (ROOT / path).read_text()
  # Code that the page runs is tested where it is run.
  text = re.sub(r"```python.*?```", "", text, flags=re.DOTALL)
  return one_line(text)


def claims_of(path):
  """Returns the claims of a page, the longest first.

  A short claim may be a part of a longer one, but not the other way round.
  """
  claims = [*PAGES[path].from_rows(), *PAGES[path].without_rows()]
  return sorted(map(one_line, claims), key=len, reverse=True)


def without_claims(text, claims):
  """Takes claims out of a page; returns the rest and what is not there."""
  missing = []
  for claim in claims:
    if claim in text:
      text = text.replace(claim, " ~ ", 1)
    else:
      missing.append(claim)
  return text, missing


@pytest.mark.parametrize("path", PAGES)
def test_every_figure_has_a_row_or_a_reason(path):
  rest, missing = without_claims(read(path), claims_of(path))
  assert not missing
  left = [
    rest[max(0, figure.start() - 60) : figure.end() + 20]
    for figure in FIGURE.finditer(rest)
  ]
  assert not left


@pytest.mark.parametrize("path", PAGES)
def test_any_figure_that_is_changed_is_noticed(path):
  text = read(path)
  claims = claims_of(path)
  unnoticed = []
  for figure in FIGURE.finditer(text):
    place = figure.start()
    other_digit = str((int(text[place]) + 1) % 10)
    changed = text[:place] + other_digit + text[place + 1 :]
    _, missing = without_claims(changed, claims)
    if not missing:
      unnoticed.append(text[place - 40 : place + 20])
  assert not unnoticed


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES)
def test_simulated_figures_are_those_of_the_simulator(path):
  claims = [one_line(claim) for claim in PAGES[path].simulated()]
  _, missing = without_claims(read(path), claims)
  assert not missing


def test_the_figure_of_the_readme_compares_what_is_treated_alike():
  settings = loss_by_time.configs()
  method = settings[loss_by_time.METHOD]
  baseline = settings[loss_by_time.BASELINE]
  assert baseline.sync.method == "allreduce"
  assert baseline.inner.momentum == 0.9
  for config in (method, baseline):
    assert config.total_steps == 2000
    assert config.inner.optimizer == "muon"
    assert config.inner.final_fraction == 0.2
    assert config.outer.average_power == 14
    assert config.mesh.num_replicas * config.data.batch_size == 8
