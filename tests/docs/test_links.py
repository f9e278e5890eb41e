"""Links to sections lead to a heading, and the site lists every page."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
# A build writes this page, and those of the sweeps into docs/results/pages.
FIELDS = DOCS / "config_fields.md"
PAGES = [
  page
  for page in DOCS.rglob("*.md")
  if page != FIELDS and "pages" not in page.parts
]
TOCTREE = re.compile(r"```\{toctree\}\n(.*?)```", re.DOTALL)


def anchors(page):
  """The names by which sections of a page are linked to, as GitHub has them."""
  text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
  headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
  lower = [heading.lower().replace("`", "") for heading in headings]
  return {re.sub(r"[^\w\- ]", "", name).replace(" ", "-") for name in lower}


@pytest.mark.parametrize(
  "page", PAGES, ids=lambda page: str(page.relative_to(DOCS))
)
def test_a_link_to_a_section_leads_to_a_heading(page):
  lost = []
  for path, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
    target = page.parent / path if path else page
    if target == FIELDS:
      continue
    if not target.exists() or anchor not in anchors(target):
      lost.append(f"{path}#{anchor}")
  assert not lost


def test_every_page_can_be_reached_from_the_lists_of_the_site():
  listed = {DOCS / "index.md"}
  for page in PAGES:
    for tree in TOCTREE.findall(page.read_text()):
      for line in tree.splitlines():
        # A line is a name, or a title and a name: "Title <name>".
        name = line.rsplit("<")[-1].rstrip(">")
        listed.add((page.parent / f"{name}.md").resolve())
  missing = {page for page in PAGES if page.resolve() not in listed}
  assert not missing


@pytest.mark.parametrize(
  "page", PAGES, ids=lambda page: str(page.relative_to(DOCS))
)
def test_no_line_is_a_comment_by_accident(page):
  # MyST leaves out lines that begin with "%", as a wrapped "0.1 %" may do.
  lines = page.read_text().splitlines()
  assert not [line for line in lines if line.lstrip().startswith("%")]
