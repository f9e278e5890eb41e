"""What the README and the pages say is what the repository holds."""

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

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [
  path
  for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
  if "results" not in path.relative_to(ROOT).parts
]


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
