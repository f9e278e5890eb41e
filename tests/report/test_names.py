"""Names with characters that a page, a picture or a terminal would act on."""

import csv
import dataclasses
import html
import io
import json
import shutil

import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from dilocox_jax.checks import printable
from dilocox_jax.report import (
  comparison,
  escape,
  load_run,
  page,
  panels,
  side_by_side,
  style,
  tables,
  write_report,
)
from dilocox_jax.report.comparison import Page
from tests.report.frames import ALLREDUCE, CLOCK, frame, setting

NAMES = {
  "a formula": "a$x^$",
  "a good formula": "$\\frac{1}{2}$",
  "one dollar": "5 $",
  "a bar": "a|b",
  "a backslash before a bar": "a\\|b\\",
  "code": "a`b``c",
  "a script": "<script>alert(1)</script> &lt; &amp;",
  "emphasis": "_a_ *b* **c** ~~d~~ __e",
  "a link": "[a](http://b) ![c](d) <http://e>",
  "line breaks": "a\nb\r\nc\u2028d\x0be",
  "markup of rich": "[red]a[/red] [/] [link=b]c[/link] :warning:",
  "control characters": "a\x1b[2Jb\x07c\x00d\x9be\x7f",
  "other scripts": "数据 данные بيانات",
  "emoji": "a 🚀 b 👩‍🚀",
  "half a surrogate": "caf\udce9",
  "a direction": "a\u202eb",
  "an underscore first": "_hidden",
  "blanks": "  a   b  ",
  "a list": "- a",
  "a heading": "# a",
  "very long": "x" * 3_000,
  "many words": "word " * 400,
}
EACH = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)


def shown(name):
  """A name as it stands on a page: on one line, blanks joined as in HTML."""
  return " ".join(printable(name).split())


def inlines(text):
  """The pieces of a page: kind of each, and what a reader sees."""
  tokens = (
    MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
  )
  return [token for token in tokens if token.type == "inline"], tokens


def cells_of(text):
  """The cells of all tables, as a reader sees them."""
  found = []
  tokens = inlines(text)[1]
  for before, token in zip(tokens, tokens[1:], strict=False):
    if before.type in ("td_open", "th_open"):
      assert {child.type for child in token.children or ()} <= {
        "text",
        "code_inline",
      }
      text = "".join(child.content for child in token.children or ())
      found.append(" ".join(text.split()))
  return found


@EACH
def test_a_name_in_a_table_of_a_page_is_shown_as_it_is(name):
  lines = tables.markdown_table(("run", name), [(name, 1), (name, name)])
  assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
  assert all("\n" not in line for line in lines)
  expected = ["run", shown(name), shown(name), "1", shown(name), shown(name)]
  assert cells_of("\n".join(lines)) == expected


@EACH
def test_a_name_in_a_sentence_or_as_code_is_shown_as_it_is(name):
  for text in (escape.markdown(name), escape.code(name)):
    pieces, _ = inlines(f"The run {text} ended.")
    assert len(pieces) == 1
    kinds = {child.type for child in pieces[0].children or ()}
    assert kinds <= {"text", "code_inline", "text_special"}
    read = "".join(child.content for child in pieces[0].children or ())
    assert " ".join(read.split()) == f"The run {shown(name)} ended."


def test_what_is_markdown_already_is_not_escaped_again():
  once = escape.markdown("a_|b")
  assert escape.markdown(once) is once
  assert (
    cells_of("\n".join(tables.markdown_table(("x",), [(once,)])))[1] == "a_|b"
  )


@EACH
def test_a_name_on_a_terminal_is_shown_without_acting(name):
  table = tables.terminal_table(("run", name), [(name, "1")], title=name)
  written = io.StringIO()
  console = Console(file=written, width=10_000, force_terminal=True)
  console.print(table)
  text = written.getvalue()
  assert printable(name).strip() in text
  for line in text.splitlines():
    # Rich's own sequences have colors alone.
    plain = line.replace("\x1b[0m", "").replace("\x1b[1m", "")
    plain = plain.replace("\x1b[3m", "")
    assert plain.isprintable()


@pytest.mark.parametrize("begin", range(0, len(NAMES), 5))
def test_names_in_a_picture_are_drawn(begin, tmp_path):
  """With warnings as errors: each letter has a glyph, and all has room."""
  names = [*NAMES.values()][begin : begin + 5]
  settings = [setting(name, [2.5, 4.5], 500) for name in names]
  found = frame(ALLREDUCE, *settings, target=2.5, clocks={CLOCK: names[0]})
  figure = panels.loss_panel(found, CLOCK, f"about {style.proper(names[-1])}")
  figure.savefig(tmp_path / "a.png")
  _, labels = figure.axes[0].get_legend_handles_labels()
  assert len(labels) == 1 + len(names) and len(max(labels, key=len)) < 100


def test_names_beside_points_are_drawn(tmp_path):
  names = [*NAMES.values()][:8]
  settings = [
    setting(name, [9.0 - number / 9] * 2, 2**number)
    for number, name in enumerate(names)
  ]
  figure = panels.loss_panel(frame(*settings), panels.BYTES, "many")
  figure.savefig(tmp_path / "b.png")


@EACH
def test_a_page_of_settings_has_each_name(name, tmp_path, monkeypatch):
  monkeypatch.setattr(comparison, "picture", lambda *_: [])
  failure = {"run": name, "reason": name, "log": name}
  own = setting(name, [2.06, 4.04], 1_000, changed=name)
  found = frame(ALLREDUCE, own, clocks={CLOCK: name})
  made = Page(name, found, failed=[failure])
  text = made.write(tmp_path, f"compare {name}").read_text()
  assert cells_of(text).count(shown(name)) >= 5
  assert text.startswith(f"# {escape.markdown(name)}\n")
  assert f"Clock '1gbit': {escape.markdown(name)}. Times" in text
  assert "\x1b" not in text
  assert not [t for t in inlines(text)[1] if t.type.startswith("html")]
  with (tmp_path / "table.csv").open(newline="") as file:
    rows = list(csv.DictReader(file))
  assert rows[1]["run"] == printable(name)
  made.print(Console(file=io.StringIO()))


def test_the_name_of_a_clock_is_shown_as_it_is(tmp_path, monkeypatch):
  monkeypatch.setattr(comparison, "picture", lambda *_: [])
  name = "a$x^$|<b>[red]\n"
  settings = [
    dataclasses.replace(
      each,
      seconds={name: each.seconds[CLOCK]},
      utilization={},
      seed_runs=[
        dataclasses.replace(
          seed_run,
          points=[
            dataclasses.replace(point, seconds={name: point.seconds[CLOCK]})
            for point in seed_run.points
          ],
        )
        for seed_run in each.seed_runs
      ],
    )
    for each in (ALLREDUCE, setting("diloco", [2.06, 4.04], 1_000))
  ]
  made = Page("x", frame(*settings, clocks={name: "words"}))
  text = made.write(tmp_path).read_text()
  assert f"## Time on the clock '{escape.markdown(name)}'" in text
  written = io.StringIO()
  made.print(Console(file=written, width=200))
  unfolded = "".join(written.getvalue().split())
  assert "Timeontheclock'a$x^$|<b>[red]\\n'" in unfolded


@EACH
def test_a_page_of_a_run_has_each_name(name, write_run, tmp_path, monkeypatch):
  record = {"clock": name, "corpus_name": name, "command": f"train {name}"}
  record |= {"platform": name, "overrides": [name]}
  record |= {"chosen_for_device": {"a": name}, "method": name}
  write_run(tmp_path, num_steps=60, **record)
  path = tmp_path / "config.json"
  config = json.loads(path.read_text())
  path.write_text(json.dumps(config | {"data": {"glob": name, name: 1}}))
  (tmp_path / "sample.txt").write_text(name, errors="replace")
  monkeypatch.setattr(page, "_FIGURES", {})
  text = write_report(tmp_path).read_text()
  cells = cells_of(text)
  assert shown(name) in cells and shown(f"data.{name}") in cells
  assert "trained 871,168 parameters on 2 rep" in text and "\x1b" not in text
  run = load_run(tmp_path)
  assert "\n" not in run.summary and run.summary.isprintable()
  shown_in_notebook = run._repr_html_()
  assert html.escape(printable(name)) in shown_in_notebook


def test_runs_in_directories_of_any_name_are_compared(write_run, tmp_path):
  write_run(tmp_path / "a", num_steps=60)
  runs = [load_run(tmp_path / "a")]
  for name in ("a$x^$", "b|`c`", "[red]", "_d", "line\nbreak"):
    shutil.copytree(tmp_path / "a", tmp_path / name)
    runs.append(load_run(tmp_path / name))
  text = side_by_side(runs).write(tmp_path / "out").read_text()
  cells = cells_of(text)
  assert {f"diloco ({name})" for name in ("a$x^$", "b|`c`", "[red]", "_d")} < {
    *cells
  }
  assert r"diloco (line\nbreak)" in cells


def test_clocks_whose_names_are_alike_have_pictures_of_their_own(tmp_path):
  clocks = ("a b", "a_b", "a$b", "c 2", "c", "数据", "данные", "x" * 300)
  seconds = dict.fromkeys(clocks, 100.0)
  settings = [
    setting(name, [2.0, 4.0], 1_000, seconds=seconds | {CLOCK: 1.0})
    for name in ("allreduce", "diloco")
  ]
  found = frame(*settings, clocks=dict.fromkeys(clocks, "x"))
  names = comparison._picture_names(found)
  assert len({*names.values()}) == len(clocks) + 2
  assert all(len(name.encode()) < 100 for name in names.values())
  assert names["a b"] == "hours_a_b"


def test_pictures_of_an_earlier_page_are_removed(tmp_path, monkeypatch):
  def new(figure, out_dir, name, caption):
    (out_dir / "figures" / f"{name}.png").write_text("new")
    return []

  monkeypatch.setattr(comparison, "picture", new)
  (tmp_path / "figures").mkdir()
  for name in ("hours_old.png", "tokens.png", "mine.png"):
    (tmp_path / "figures" / name).write_text("old")
  found = frame(ALLREDUCE, setting("diloco", [2.5, 4.5], 500))
  Page("x", found).write(tmp_path)
  names = {path.name for path in (tmp_path / "figures").iterdir()}
  assert names == {"hours_1gbit.png", "tokens.png", "bytes.png", "mine.png"}
  assert (tmp_path / "figures" / "tokens.png").read_text() == "new"
