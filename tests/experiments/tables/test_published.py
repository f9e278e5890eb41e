import json
import pathlib

import pytest

from experiments.tables import published
from experiments.tables.published import Figure, load_published

FOLDER = pathlib.Path(__file__).parents[3] / "third_party" / "published"
GOOD = {
  "name": "utilisation",
  "value": 90,
  "unit": "percent",
  "source": "a paper, table 1",
  "status": "published",
}


def write(path, *figures):
  path.write_text(json.dumps({"paper": "a paper", "figures": list(figures)}))
  return path


@pytest.mark.parametrize(
  "path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem
)
def test_every_file_of_the_project_loads_and_names_its_sources(path):
  figures = load_published(path)
  assert figures
  assert all(name == figure.name for name, figure in figures.items())
  readme = (FOLDER / "README.md").read_text()
  assert f"`{path.name}`" in readme


def test_what_was_not_read_in_a_paper_is_not_called_published():
  figures = load_published(FOLDER / "dilocox.json")
  assert figures["107B, speed-up over AllReduce"].is_verified
  for name in ("107B, AllReduce, throughput", "107B, DiLoCoX, throughput"):
    assert not figures[name].is_verified


def test_ratios_that_are_recalled_agree_with_the_published_ratio():
  figures = load_published(FOLDER / "dilocox.json")
  quotient = (
    figures["107B, DiLoCoX, throughput"].value
    / figures["107B, AllReduce, throughput"].value
  )
  headline = figures["107B, speed-up over AllReduce"].value
  assert quotient == pytest.approx(headline, rel=0.01)


def test_a_figure_keeps_what_its_file_says(tmp_path):
  path = write(tmp_path / "a.json", {**GOOD, "note": "of 3"})
  expected = Figure(
    "utilisation", 90.0, "percent", "a paper, table 1", "published", "of 3"
  )
  assert load_published(path) == {"utilisation": expected}


@pytest.mark.parametrize(
  "change, words",
  [
    ({"status": "guessed"}, "status='guessed' must be 'published' or"),
    ({"unit": " "}, "unit is missing"),
    ({"unit": None}, "unit=None must be a text"),
    ({"value": "90"}, "value='90' must be a number"),
    ({"value": True}, "value=True must be a number"),
    ({"value": float("nan")}, "value=nan must be finite"),
    ({"units": "percent"}, "units is not a field"),
  ],
)
def test_a_wrong_figure_is_refused_in_one_line(tmp_path, change, words):
  path = write(
    tmp_path / "a.json", GOOD | {"name": "first"}, {**GOOD, **change}
  )
  with pytest.raises(ValueError) as caught:
    load_published(path)
  message = str(caught.value)
  assert words in message
  assert "figure 2 ('utilisation')" in message
  assert str(path) in message
  assert "\n" not in message


@pytest.mark.parametrize("field", sorted(GOOD))
def test_every_field_but_the_note_is_needed(tmp_path, field):
  path = write(
    tmp_path / "a.json", {k: v for k, v in GOOD.items() if k != field}
  )
  with pytest.raises(ValueError, match=f"{field} is missing"):
    load_published(path)


def test_a_name_is_used_once(tmp_path):
  path = write(tmp_path / "a.json", GOOD, GOOD)
  with pytest.raises(ValueError, match="another figure has this name"):
    load_published(path)


@pytest.mark.parametrize(
  "text, words",
  [
    ("{", "not JSON"),
    ("[]", "the file must be"),
    ('{"paper": "x", "figures": {}}', "figures must be a list"),
    ('{"paper": "x", "figures": [3]}', "figure 1: a figure must be"),
  ],
)
def test_a_file_of_another_shape_is_refused(tmp_path, text, words):
  path = tmp_path / "a.json"
  path.write_text(text)
  with pytest.raises(ValueError, match=words) as caught:
    load_published(path)
  assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused_by_name(tmp_path):
  with pytest.raises(ValueError, match="absent.json"):
    published.load_published(tmp_path / "absent.json")
