"""What the README and the pages say is what the repository holds."""

import collections
import csv
import itertools
import pathlib
import re
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.outer.outer_step import OuterStep
from dilocox_jax.plan.schedule.methods import METHODS, diloco
from dilocox_jax.report.frame import standard_error
from docs.figures import loss_by_time

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs/results.md").read_text()
PAGES = [
  path
  for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
  if "results" not in path.relative_to(ROOT).parts
]


def rows(name):
  with (ROOT / f"docs/results/{name}.csv").open(newline="") as file:
    return list(csv.DictReader(file))


def test_the_readme_lists_every_method():
  assert not [name for name in METHODS if f"| `{name}` |" not in README]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_into_the_repository_leads_somewhere(page):
  links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
  links += re.findall(r"\{doc\}`([^`<]+)`", page.read_text())
  ends = "", ".md"
  lost = {
    link
    for link in links
    if not any((page.parent / (link + end)).exists() for end in ends)
  }
  assert not lost


@pytest.mark.slow
def test_the_headline_is_computed_from_rows_that_were_given_the_same():
  entries = loss_by_time.read()
  for name, other in loss_by_time.PAIRS.items():
    assert entries[name].baseline == other
  early, late = (
    loss_by_time.seconds(entries[name], loss_by_time.SHOWN)[0]
    for name in ("overlap_loco", loss_by_time.PAIRS["overlap_loco"])
  )
  assert f"**{late / early:.1f} times sooner**" in README
  assert f"{early:.1f} s instead of {late:.1f} s" in README
  for trip in loss_by_time.ROUND_TRIPS:
    (ratio,) = loss_by_time.ratios(entries, "overlap_loco", trip)
    muloco = loss_by_time.ratios(entries, "muloco", trip)
    several = loss_by_time.ratio_text(muloco).partition(" (")[0]
    assert f"{ratio:.1f}" in README
    (row,) = re.findall(rf"^\| {trip} ms \|.*$", RESULTS, re.MULTILINE)
    assert f"| {ratio:.1f} (" in row and several in row


def losses_by_run():
  """Losses of the seeds of every run behind the results page."""
  found = collections.defaultdict(list)
  for sweep in ("convergence_small", "convergence_muon"):
    for row in rows(sweep):
      found[sweep, row["name"]].append(float(row["loss"]))
  for sweep in ("replicas_main", "replicas_one", "replicas_long"):
    for row in rows(sweep):
      found[sweep, row["name"]].append(float(row["judge_loss"]))
  return found


def test_losses_and_gaps_are_those_of_the_committed_runs():
  runs = losses_by_run().values()
  kept = {f"{sum(x) / len(x):.4f} ± {standard_error(x):.4f}" for x in runs}
  shown = re.findall(r"\d\.\d{4} ± \d\.\d{4}", RESULTS)
  assert len(shown) > 50 and set(shown) <= kept, set(shown) - kept
  gaps = set()
  for own, base in itertools.permutations(runs, 2):
    base = base[: len(own)]  # Seeds are in order.
    if len(own) == len(base):
      each = standard_error([a / b - 1 for a, b in zip(own, base, strict=True)])
      gap = 100 * (sum(own) / sum(base) - 1)
      gaps.add(f"{gap:+.2f} ± {100 * each:.2f} %")
  shown = re.findall(r"[+−-]\d+\.\d\d ± \d\.\d\d %", README)
  assert len(shown) > 5 and set(shown) <= gaps, set(shown) - gaps


def test_the_page_lists_the_files_that_hold_a_pseudo_gradient():
  page = (ROOT / "docs/notes/pseudo_gradient.md").read_text()
  files = re.findall(r"^\| \d+ \| `(dilocox_jax/\S+)`", page, re.MULTILINE)
  assert len(files) == len(set(files)) <= 10
  assert files_that_hold_it() == set(files)


def files_that_hold_it():
  """Files of functions that have arrays between measure and apply."""
  rounds = dx.make_rounds(
    diloco(1),
    lambda params, state, batch: (params, state, (batch, batch)),
    optax.sgd(1.0),
    num_replicas=2,
    exchange=dx.exchange("low_rank(rank=2)+int(bits=4)", feedback=1.0),
  )
  state = rounds.init({"w": jnp.ones((32, 16)), "b": jnp.ones(5)}, ())
  parts = ("measure", "exchange", "apply")
  outer = {getattr(OuterStep, part).__code__ for part in parts}
  called, depth = set(), 0

  def note(frame, event, result):
    nonlocal depth
    path = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
    if not path.startswith("dilocox_jax/"):
      return
    depth += (event == "call") * (frame.f_code in outer)
    if depth and event == "return":
      kept = [*frame.f_locals.values(), result]
      trees = [each for each in kept if not isinstance(each, Iterator)]
      held = jax.tree.leaves(trees)
      called.update({path} if any(map(is_array, held)) else ())
    depth -= (event == "return") * (frame.f_code in outer)

  before = sys.getprofile()
  sys.setprofile(note)
  try:
    rounds.run(state, jnp.ones((2, 1)))
  finally:
    sys.setprofile(before)
  return called


def is_array(value):
  return isinstance(value, jax.Array)
