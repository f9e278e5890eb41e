"""What the README and the pages say is what the repository holds."""

import collections
import csv
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.plan.schedule.methods import METHODS
from docs.figures import loss_by_time

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [
  path
  for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
  if "results" not in path.relative_to(ROOT).parts
]
CONVERGENCE = json.loads(
  (ROOT / "docs/results/convergence_small/convergence.json").read_text()
)


def test_the_readme_is_read_in_a_few_minutes():
  assert len(README.splitlines()) <= 130


def test_the_example_of_the_readme_has_fifteen_lines():
  assert len(re.findall(r"^(>>>|\.\.\.) ", README, re.MULTILINE)) <= 15


def test_the_readme_lists_every_method():
  missing = [name for name in METHODS if f"| `{name}` |" not in README]
  assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_into_the_repository_leads_somewhere(page):
  links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
  links += re.findall(r"\{doc\}`([^`<]+)`", page.read_text())
  lost = [
    link
    for link in links
    if not any((page.parent / (link + end)).exists() for end in ("", ".md"))
  ]
  assert not lost


@pytest.mark.slow
def test_the_number_of_the_readme_is_what_its_figure_computes_today():
  seconds = loss_by_time.seconds_to_target(loss_by_time.read().entries)
  early, late = seconds["overlap_loco"], seconds["allreduce_muon"]
  assert f"**{late / early:.1f} times sooner**" in README
  assert f"after {early:.1f} s instead of {late:.1f} s" in README


def test_losses_of_the_results_page_are_those_of_the_committed_runs():
  page = (ROOT / "docs/results.md").read_text()
  at_tokens = page.split("## Loss at equal tokens")[1].split("## Loss at")[0]
  kept = {
    f"{sum(each['losses'].values()) / len(each['losses']):.4f}"
    for each in CONVERGENCE["methods"]
  }
  kept |= _mean_losses(ROOT / "docs/results/convergence_muon.csv")
  shown = re.findall(r"^\| [^|]+ \| (\d\.\d{4}) \|", at_tokens, re.MULTILINE)
  assert len(shown) > 10
  assert set(shown) <= kept


def _mean_losses(path: pathlib.Path) -> set[str]:
  """The mean loss of each method whose three results are committed."""
  losses = collections.defaultdict(list)
  for row in csv.DictReader(path.read_text().splitlines()):
    if row["stage"] == "results":
      losses[row["method"]].append(float(row["final_loss"]))
  return {f"{sum(of) / 3:.4f}" for of in losses.values() if len(of) == 3}


def test_the_way_of_the_pseudo_gradient_leads_through_its_eight_files():
  page = (ROOT / "docs/pseudo_gradient.md").read_text()
  files = re.findall(r"^\| \d \| `(dilocox_jax/\S+)`", page, re.MULTILINE)
  assert 0 < len(files) <= 8
  called = _files_of_an_update()
  assert set(files) <= called, set(files) - called


def _files_of_an_update() -> set[str]:
  tx = dx.diloco(
    optax.sgd(1.0),
    optax.sgd(1.0),
    sync_interval=4,
    codec="int",
    error_feedback=True,
  )
  params = {"w": jnp.zeros((2, 3, 4))}
  state = jax.vmap(tx.init, axis_name="replica")(params)
  update = jax.vmap(
    lambda gradients, state, params: tx.update(gradients, state, params),
    axis_name="replica",
  )
  called = set()

  def note(frame, event, argument):
    del event, argument
    called.add(frame.f_code.co_filename)

  before = sys.getprofile()
  sys.setprofile(note)
  try:
    jax.make_jaxpr(update)(params, state, params)
  finally:
    sys.setprofile(before)
  root = f"{ROOT}/"
  return {name.removeprefix(root) for name in called if name.startswith(root)}
