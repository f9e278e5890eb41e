"""What the README and the pages say is what the repository holds."""

import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import dilocox_jax as dx
from dilocox_jax.plan.schedule.methods import METHODS, diloco

ROOT = pathlib.Path(__file__).parents[2]
METHODS_PAGE = (ROOT / "docs/methods.md").read_text()
# The pages of sweeps are written when the documentation is built.
WRITTEN = ROOT / "docs/results/pages"
PAGES = [
  path
  for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
  if WRITTEN not in path.parents
]


def test_the_page_of_methods_lists_every_method():
  assert not [name for name in METHODS if f"\n| `{name}` |" not in METHODS_PAGE]


def test_the_page_of_methods_says_when_to_choose_each():
  choices, _, _ = METHODS_PAGE.partition("## All methods")
  assert not [name for name in METHODS if f"\n- **`{name}`**" not in choices]


def test_the_readme_has_600_to_900_words():
  words = (ROOT / "README.md").read_text().split()
  assert 600 <= len(words) <= 900


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


# They only name leaves, map programs, divide arrays among devices, make states
# and check the user's step.
BESIDE_THE_WAY = {
  "trees.py",
  "distributed/local_map.py",
  "distributed/replicas.py",
  "rounds/states.py",
  "api/rounds.py",
}


def test_the_page_lists_the_files_that_are_given_a_pseudo_gradient():
  page = (ROOT / "docs/how_it_works/pseudo_gradient.md").read_text()
  files = re.findall(r"^\| \d+ \| `(\S+)`", page, re.MULTILINE)
  assert len(files) == len(set(files))
  found = files_given_matrices()
  assert found == set(files) | BESIDE_THE_WAY
  assert f"That makes {len(found)} files" in page


def files_given_matrices():
  """Files of the package whose functions are given matrices in a round."""
  rounds = dx.make_rounds(
    diloco(1),
    lambda params, state, batch: (params, state, (batch, batch)),
    optax.sgd(1.0),
    num_replicas=2,
    exchange=dx.exchange("low_rank(rank=2)+int(bits=4)", feedback=1.0),
  )
  state = rounds.init({"w": jnp.ones((32, 16)), "b": jnp.ones(5)}, ())
  folder = f"{ROOT}/dilocox_jax/"
  found = set()

  def note(frame, event, result):
    del result
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(folder):
      names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
      arguments = [frame.f_locals.get(name) for name in names]
      if any(map(holds_matrix, arguments)):
        found.add(code.co_filename.removeprefix(folder))

  before = sys.getprofile()
  sys.setprofile(note)
  try:
    rounds.run(state, jnp.ones((2, 1)))
  finally:
    sys.setprofile(before)
  return found


def holds_matrix(value, depth=4):
  """Whether a value is an array of two axes, or holds one."""
  if isinstance(value, jax.Array):
    return value.ndim >= 2
  if isinstance(value, dict):
    value = list(value.values())
  is_deeper = depth > 0 and isinstance(value, list | tuple)
  return is_deeper and any(holds_matrix(each, depth - 1) for each in value)
