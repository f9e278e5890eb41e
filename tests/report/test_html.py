"""The page of a run as one HTML file."""

import base64
import re
from html.parser import HTMLParser

import pytest

from dilocox_jax.report import write_report
from dilocox_jax.report.html import html_page
from dilocox_jax.report.page import write_page


class Elements(HTMLParser):
  """Lists the elements of a page, and its text."""

  def __init__(self, page):
    super().__init__()
    self.tags = []
    self.sources = []
    self.words = []
    self.feed(page)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    if tag == "img":
      self.sources.append(dict(attrs)["src"])

  def handle_data(self, data):
    self.words.append(data)


def test_the_html_page_has_the_text_and_the_pictures_inside(
  write_run, tmp_path
):
  page = write_report(write_run(tmp_path, num_steps=60))
  html = (tmp_path / "report.html").read_text()
  elements = Elements(html)
  names = re.findall(r"\]\((.*?\.png)\)", page.read_text())
  assert len(elements.sources) == len(names) > 0
  for name, source in zip(names, elements.sources, strict=True):
    kind, _, content = source.partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(content) == (tmp_path / name).read_bytes()
  headings = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
  assert re.findall("<h2>(.*?)</h2>", html) == headings
  assert "validation loss, outer parameters" in elements.words
  assert not re.search(r'(?:src|href)="(?!data:)', html)


def test_names_of_users_stay_text(tmp_path):
  name = '<script>alert(1)</script> & "quoted"'
  write_page(tmp_path, name, ["A text with <b>tags</b>, [a](javascript:b)."])
  html = (tmp_path / "report.html").read_text()
  elements = Elements(html)
  assert not {"script", "b", "a"} & set(elements.tags)
  assert name in "".join(elements.words)


def test_a_picture_that_is_a_link_is_not_put_on_the_page(tmp_path):
  (tmp_path / "secret.png").write_bytes(b"secret")
  folder = tmp_path / "run"
  (folder / "figures").mkdir(parents=True)
  (folder / "figures" / "loss.png").symlink_to(tmp_path / "secret.png")
  page = html_page("run", "![loss](figures/loss.png)", folder)
  assert Elements(page).sources == [""]


@pytest.mark.parametrize("table", ["| a | b |\n| --- | --- |\n| 1 | x\\|y |"])
def test_a_table_of_markdown_is_a_table(tmp_path, table):
  page = html_page("table", table, tmp_path)
  assert re.findall("<t[hd]>(.*?)</t[hd]>", page) == ["a", "b", "1", "x|y"]
