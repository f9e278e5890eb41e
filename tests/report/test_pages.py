"""Pages of a run, of runs side by side, and of sweeps."""

import csv
import dataclasses
import io
import json
import math
import os
import re

import pytest
from matplotlib.image import imread
from rich.console import Console

from dilocox_jax.metrics.lines import RecordError
from dilocox_jax.metrics.recorder import Recorder
from dilocox_jax.report import figures, load_run, side_by_side, write_report
from dilocox_jax.report.comparison import Page
from tests.report.frames import ALLREDUCE, DILOCO, NOISY, frame, setting

SHORT = setting("diloco, 50 steps", [2.5, 4.5], 500, steps=50)


def assert_pictures(page, *names):
  """The pictures are those that the page shows, and not blank."""
  assert re.findall(r"\]\((.*?\.png)\)", page.read_text()) == list(names)
  for name in names:
    pixels = imread(page.parent / name)
    assert min(pixels.shape[:2]) > 400 and pixels.std() > 0.05


def table_of(path):
  return list(csv.DictReader(path.read_text().splitlines()))


def printed(page):
  text = io.StringIO()
  page.print(Console(file=text, width=160))
  return text.getvalue()


def cells(text):
  """The cells of all Markdown tables of a page, by the first of their row."""
  rows = re.findall(r"^\| (.*?) \| (.*) \|$", text, flags=re.MULTILINE)
  return {first: others.split(" | ") for first, others in rows}


def test_the_page_of_a_run_has_its_numbers_and_their_kinds(workdir, run):
  page = workdir / "report.md"
  text = page.read_text()
  final = run.result
  names = ("loss", "drift", "hours", "ranks")
  assert_pictures(page, *(f"figures/{name}.png" for name in names))
  found = cells(text)
  loss = final.outer_loss
  assert found["validation loss, outer parameters"] == [
    f"{loss:.4f}",
    "measured",
  ]
  assert found["validation loss, replica 0"][0] == f"{final.replica_loss:.4f}"
  assert found["bytes sent by one replica"] == ["578 MB", "derived"]
  assert found["tokens, all replicas"] == ["1,228,800", "counted"]
  assert found["round"] == ["20", "50.0"] and found["all"] == ["31", "69.0"]
  assert found["`sync.sync_interval`"] == ["`30`"]
  for part in (
    f"**{loss:.4f}** nats a token, perplexity {math.exp(loss):,.4g}",
    f"{loss / math.log(2) / 2:.4f} bits a byte",
    "`9f3a61c2d07e`",
    "12,288 tokens/s",
    "--config.sync.method=diloco",
  ):
    assert part in text
  for absent in ("kernel counted", "waited", "another way", "for the device"):
    assert absent not in text


def test_the_report_of_a_replica_with_a_mailbox_counts_its_own_tokens(
  write_run, tmp_path
):
  run = load_run(write_run(tmp_path, num_steps=90, collective="mailbox"))
  text = write_report(tmp_path).read_text()
  found = cells(text)
  assert found["tokens, this replica"] == [f"{run.tokens:,}", "counted"]
  assert "tokens of this replica)" in text and "/s of this replica." in text
  assert "all replicas" not in text
  figure = figures.loss_figure(run)
  assert figure
  (ax,) = figure.axes
  assert ax.get_xlabel() == "k tokens, this replica"


def change(path, **changes):
  """Changes all JSON lines of a file."""
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  lines = [json.dumps(row | changes) + "\n" for row in rows]
  path.write_text("".join(lines))


def test_the_page_says_what_else_is_known(write_run, tmp_path):
  """Waits, what a link carried, other starts, a loss that is not known."""
  run = load_run(write_run(tmp_path, num_steps=90, finish=False))
  share = 1.05 * run.total_sent_bytes / len(run.timings)
  change(tmp_path / "timing.jsonl", link_bytes=share, exposed_s=0.25)
  change(tmp_path / "metrics.jsonl", mean_loss=None)
  starts = {"earlier_starts": [{}, {}], "chosen_for_device": {"a.b": "dots"}}
  overrides = {"overrides": ["exchange", "frozen weights 9"]}
  record = json.dumps(run.record | starts | overrides)
  (tmp_path / "run.json").write_text(record)
  text = write_report(tmp_path).read_text()
  for part in (
    *("not ended", "1.050 times", "waited 0.250 s", "0.250 s at most"),
    *("(2 earlier starts", "`a.b=dots`", "replica 0 |", "settings: exchange."),
  ):
    assert part in text
  assert "replicas' mean" not in text and "The final" not in text


@pytest.mark.parametrize(
  ("changes", "shown"),
  [
    ({"method": "allreduce"}, ["loss"]),
    ({"method": "single", "num_replicas": 1}, ["loss"]),
    ({"num_steps": 0, "finish": False}, []),
  ],
)
def test_a_figure_with_nothing_to_show_is_left_out(
  write_run, tmp_path, changes, shown
):
  page = write_report(write_run(tmp_path, **{"num_steps": 60} | changes))
  assert_pictures(page, *(f"figures/{name}.png" for name in shown))


@pytest.mark.parametrize(
  ("name", "text", "said"),
  [
    ("run.json", "{", "run.json is no JSON object"),
    ("run.json", "{}", "run.json is damaged: it has no bytes_per_token"),
    ("run.json", None, "is not a run directory: run.json is missing"),
    ("timing.jsonl", '{"step": 3}\n', "timing.jsonl has a damaged row"),
    ("metrics.jsonl", '{"step": 3, "kind": "round"}\n', "metrics.jsonl has a"),
    ("figures", "in the way", "cannot write .*figures"),
  ],
)
def test_a_broken_record_is_named_on_one_line(
  write_run, tmp_path, name, text, said
):
  write_run(tmp_path, num_steps=30)
  (tmp_path / name).unlink(missing_ok=True)
  if text is not None:
    (tmp_path / name).write_text(text)
  with pytest.raises(RecordError, match=said) as error:
    write_report(tmp_path)
  assert "\n" not in str(error.value)


def test_pictures_are_not_written_behind_a_link(write_run, tmp_path):
  workdir = tmp_path / "run"
  victim = tmp_path / "victim"
  write_run(workdir, num_steps=30)
  victim.mkdir()
  (workdir / "figures").symlink_to(victim)
  with pytest.raises(RecordError, match="figures is a symbolic link"):
    write_report(workdir)
  assert not list(victim.iterdir())


def test_a_sample_is_a_file_of_the_run_and_nothing_else(write_run, tmp_path):
  workdir = write_run(tmp_path / "run")
  other = tmp_path / "other"
  other.write_text("secret")
  sample = workdir / "sample.txt"

  def page():
    return write_report(workdir).read_text()

  sample.write_text("once upon\n\x1b[31m")
  assert "## A sample\n\n    once upon\n    \\x1b[31m\n" in page()
  for make in (
    lambda: sample.symlink_to(other),
    lambda: os.mkfifo(sample),
    sample.mkdir,
  ):
    sample.unlink()
    make()
    assert "## A sample" not in page() and "secret" not in page()


def test_a_run_is_as_far_as_its_rows(write_run, tmp_path, run):
  assert run.finished and len(run.rounds) == 20 and len(run.evaluations) == 10
  assert (run.steps, run.tokens) == (600, 1_228_800)
  assert run.validation_loss == run.result.outer_loss
  assert "578 MB sent" in run.summary
  killed = load_run(write_run(tmp_path / "a", num_steps=90, finish=False))
  assert not killed.finished and killed.steps == 90
  assert [row.step for row in killed.evaluations] == [60]
  Recorder(tmp_path / "a", resume_step=30).record_timing(
    step=60, event="round", wall_s=7.5, tokens_per_s=4096.0
  )
  # (2.5 s x 12288/s + 7.5 s x 4096/s) / 10 s; compiling trains nothing.
  resumed = load_run(tmp_path / "a")
  assert (resumed.tokens_per_s, resumed.wall_s) == pytest.approx((6144, 21.5))
  none = load_run(write_run(tmp_path / "b", num_steps=0, finish=False))
  assert (none.steps, none.tokens, none.total_sent_bytes) == (0, 0, 0)
  assert math.isnan(none.validation_loss) and math.isnan(none.tokens_per_s)


def test_a_sweep_has_tables_settings_pictures_and_data(tmp_path):
  own = dataclasses.replace(DILOCO, changed="sync_interval=25")
  found = frame(ALLREDUCE, own, NOISY, SHORT, target=2.5)
  failure = {"run": "muloco, seed 1", "reason": "killed", "log": "x.log"}
  page = Page("small", found, ["Two seeds.", "- Read it."], [failure])
  path = page.write(tmp_path, "cmd")
  text = path.read_text()
  for part in (
    "| diloco | 3.0500 ± 0.9900 | +1.67 ± 1.00 % | allreduce | 1.00 kB | 8.00x",
    # What has other numbers of tokens stands apart.
    "| diloco, 50 steps | 3.5000 ± 1.0000 | 500 B | 1.67 min |",
    "first: diloco, muloco",
    *("    cmd", "Two seeds.", "- Read it.", "sync_interval=25 |"),
    "| muloco, seed 1 | killed | x.log |",
  ):
    assert part in text
  pictures = ("tokens", "bytes", "hours_1gbit")
  assert_pictures(path, *(f"figures/{name}.png" for name in pictures))
  rows = {row["run"]: row for row in table_of(tmp_path / "table.csv")}
  assert float(rows["diloco"]["gap_standard_error"]) == pytest.approx(0.01)
  assert float(rows["diloco"]["seconds:1gbit"]) == 100
  assert rows["diloco"]["is_on_pareto_front"] == "True"
  assert "diloco" in printed(page)


def test_a_sweep_without_runs_has_a_page(tmp_path):
  empty = frame(dataclasses.replace(ALLREDUCE, seed_runs=()), clocks={})
  text = Page("empty", empty).write(tmp_path).read_text()
  assert "allreduce (0 of 2 seeds) | none yet" in text


def test_runs_are_compared_at_equal_time_and_at_equal_tokens(
  write_run, tmp_path, run
):
  slow = {"clock": "cluster 1gbit", "seconds_a_step": 1000.0}
  other = load_run(
    write_run(tmp_path / "b", method="allreduce", floor=1.8, **slow)
  )
  page = side_by_side([run, other])
  path = page.write(tmp_path / "out")
  text = path.read_text()
  shown = printed(page)
  loss = run.validation_loss
  base_loss = other.validation_loss
  gap = f"{100 * (loss / base_loss - 1):+.2f} %"
  # After 6,000 s AllReduce has made 6 of its steps.
  for cells in (
    ["run", "loss", "gap", "sent bytes", "fewer bytes", "steps"],
    ["diloco", f"{loss:.4f}", gap, "578 MB", "3.62x", "600"],
    ["allreduce", f"{base_loss:.4f}", "-", "2.09 GB", "1.00x", "600"],
    ["run", "simulated time", "loss at 1.67 h"],
    ["diloco", "1.67 h", f"{loss:.4f}"],
    ["allreduce", "167 h", "6 steps"],
  ):
    assert f"| {' | '.join(cells)} |" in text
    assert cells[0] == "run" or all(cell in shown for cell in cells)
  rows = table_of(tmp_path / "out/table.csv")
  assert [row["run"] for row in rows] == ["diloco", "allreduce"]
  assert float(rows[0]["loss"]) == loss
  assert int(rows[0]["tokens"]) == run.tokens
  pictures = ("tokens", "bytes", "hours_cluster_1gbit")
  assert_pictures(path, *(f"figures/{name}.png" for name in pictures))


@pytest.mark.parametrize(
  "field, says", [("digest", "bbbb"), ("held_out", "different windows")]
)
def test_runs_on_different_texts_are_refused_in_one_line(
  write_run, tmp_path, field, says
):
  workdirs = [
    write_run(tmp_path / text[0], num_steps=30, **{field: text})
    for text in ("aaaa", "bbbb")
  ]
  with pytest.raises(ValueError, match=says) as error:
    side_by_side(list(map(load_run, workdirs)))
  text = str(error.value)
  assert "\n" not in text and all(str(workdir) in text for workdir in workdirs)
  with pytest.raises(ValueError, match="at least one run"):
    side_by_side([])


def test_what_a_reader_would_take_to_be_alike_is_said(write_run, tmp_path):
  """Other budgets and replicas, one run alone, and no number."""
  first = write_run(tmp_path / "a", num_steps=60)
  more = {"num_steps": 120, "num_replicas": 3, "floor": math.nan}
  other = write_run(tmp_path / "b", **more)
  page = side_by_side(list(map(load_run, (first, other))))
  assert any("replicas: diloco (a) 2, diloco (b) 3" in x for x in page.intro)
  # What sent most is the baseline where nobody sent all.
  assert {each.baseline for each in page.frame.settings} == {"diloco (b)"}
  assert "With other numbers" in printed(page) and "not fin" in printed(page)
  alone = write_run(tmp_path / "c", num_steps=60, finish=False)
  shown = printed(side_by_side([load_run(alone)]))
  assert "30.0x" in shown  # Than fp32 gradients in every step.
  assert "gap" not in shown and "diloco (not finished)" in shown


BASE = "allreduce, momentum of nine tenths"
LONG = Page(
  "long names",
  frame(
    setting("overlap_loco_of_nine_tenths, H = 30", [2.06, 4.04], 1_000, BASE),
    setting("overlap_loco, last rate zero", [2.2, 3.8], 2_000, BASE),
    setting(BASE, [2.0, 4.0], 8_000, BASE),
    clocks={},
  ),
)


def printed_table(page, width):
  """The words of the header, and those of each line, that a terminal shows."""
  text = io.StringIO()
  page.print(Console(file=text, width=width))
  assert max(map(len, text.getvalue().splitlines())) <= width
  header, _, lines = text.getvalue().partition(" \u2500")
  return header.split(), [line.split() for line in lines.splitlines()[1:-1]]


def test_names_of_baselines_are_shown_where_there_is_room():
  header, lines = printed_table(LONG, 140)
  assert "#" not in header and "to" in header and "fewer" in header
  assert [" ".join(line).count(BASE) for line in lines] == [1, 1, 1]


def test_on_a_narrow_terminal_a_number_stands_for_a_baseline():
  header, lines = printed_table(LONG, 100)
  assert header.count("#") == 2 and "fewer" in header
  assert [line[0] for line in lines] == ["1", "2", "3"]
  # Behind the unit of the gap is the number of the baseline's row.
  assert [line[line.index("%") + 1] for line in lines[:2]] == ["3", "3"]
  assert [" ".join(line).count(BASE) for line in lines] == [0, 0, 1]


def test_on_a_narrower_terminal_no_word_is_broken():
  header, lines = printed_table(LONG, 80)
  assert header.count("#") == 2 and "fewer" not in header
  assert lines[0][:2] == ["1", "overlap_loco_of_nine_tenths,"]
