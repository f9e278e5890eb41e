import json
import math
import re

import pytest
from matplotlib.image import imread

from dilocox_jax.metrics import RecordError, read_rows
from dilocox_jax.report import write_report

SECTIONS = (
  "Results",
  "Figures",
  "What it cost",
  "Settings",
  "How to reproduce",
)


def _sections(text):
  return re.findall(r"^## (.*)$", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
  ("changes", "shown"),
  [
    ({}, ["loss", "drift", "sent"]),
    ({"method": "allreduce"}, ["loss", "sent"]),
    ({"method": "single", "num_replicas": 1, "finish": False}, ["loss"]),
    ({"num_steps": 0, "finish": False}, []),
  ],
)
def test_the_page_has_every_section_and_the_figures_it_names(
  write_run, tmp_path, changes, shown
):
  page = write_report(write_run(tmp_path / "a", **changes))
  text = page.read_text()
  assert page == tmp_path / "a/report.md"
  assert tuple(_sections(text)) == SECTIONS
  named = re.findall(r"\]\((figures/.*?)\)", text)
  assert named == [f"figures/{name}.png" for name in shown]
  for name in named:
    assert (page.parent / name).read_bytes().startswith(b"\x89PNG")
    pixels = imread(page.parent / name)
    assert min(pixels.shape[:2]) > 400 and pixels.std() > 0.05


def test_the_page_names_loss_corpus_and_what_is_measured(write_run, tmp_path):
  workdir = write_run(tmp_path / "a")
  final = read_rows(workdir / "metrics.jsonl")[-1]
  text = write_report(workdir).read_text()
  summary = text.split("\n\n")[1]
  assert f"**{final['outer_loss']:.4f}** nats a token, perplexity" in summary
  shown = f"perplexity {math.exp(final['outer_loss']):,.4g} (measured)"
  assert shown in summary
  assert "The final validation loss" in summary
  assert "`9f3a61c2d07e`" in summary and "derived from the plan" in summary
  assert f"| validation loss, replica 0 | {final['replica_loss']:.4f} |" in text


def test_the_page_says_how_many_bits_a_byte_took(write_run, tmp_path):
  workdir = write_run(tmp_path / "a")
  record = json.loads((workdir / "run.json").read_text())
  record["bytes_per_token"] = 2.0
  (workdir / "run.json").write_text(json.dumps(record))
  final = read_rows(workdir / "metrics.jsonl")[-1]
  text = write_report(workdir).read_text()
  bits = final["outer_loss"] / math.log(2) / 2
  assert f"{bits:.4f} bits a byte (measured)" in text


def test_the_page_says_what_a_real_link_carried_and_what_was_hidden(
  write_run, tmp_path
):
  workdir = write_run(tmp_path / "a")
  plain = write_report(workdir).read_text()
  assert "The kernel counted" not in plain and "waited" not in plain
  rows = read_rows(workdir / "timing.jsonl")
  total = read_rows(workdir / "metrics.jsonl")[-1]["total_sent_bytes"]
  for number, row in enumerate(rows):
    row["link_bytes"] = 1.05 * total / len(rows)
    if row["event"] == "round":
      row["exposed_s"] = 0.25 if number < len(rows) - 3 else 0.75
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (workdir / "timing.jsonl").write_text(lines)
  text = write_report(workdir).read_text()
  assert "1.050 times what the plan says" in text
  assert "waited 0.250 s for them (median, measured), and 0.750 s" in text


def test_a_loss_that_was_not_computed_has_no_row(write_run, tmp_path):
  workdir = write_run(tmp_path / "a")
  rows = read_rows(workdir / "metrics.jsonl")
  for row in rows:
    if row["kind"] != "round":
      row["mean_loss"] = None
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  (workdir / "metrics.jsonl").write_text(lines)
  text = write_report(workdir).read_text()
  assert "replicas' mean" not in text and "replica 0 |" in text


def test_the_page_of_an_unfinished_run_says_so(write_run, tmp_path):
  text = write_report(write_run(tmp_path / "a", finish=False)).read_text()
  assert "The run has not ended" in text and "The final" not in text


def test_the_page_says_if_parts_of_a_run_were_started_otherwise(
  write_run, tmp_path
):
  workdir = write_run(tmp_path / "a")
  assert "started in another way" not in write_report(workdir).read_text()
  path = workdir / "run.json"
  record = json.loads(path.read_text())
  path.write_text(json.dumps(record | {"earlier_starts": [{}, {}]}))
  text = write_report(workdir).read_text()
  assert "started in another way (2 earlier starts" in text


def test_the_page_says_what_was_chosen_for_the_device(write_run, tmp_path):
  workdir = write_run(tmp_path / "a")
  assert "chosen for the device" not in write_report(workdir).read_text()
  path = workdir / "run.json"
  record = json.loads(path.read_text())
  chosen = {"chosen_for_device": {"model.remat": "dots"}}
  path.write_text(json.dumps(record | chosen))
  text = write_report(workdir).read_text()
  assert "chosen for the device: `model.remat=dots`" in text


def test_the_cost_is_the_sum_of_the_timing_rows(write_run, tmp_path):
  workdir = write_run(tmp_path / "a")
  rows = read_rows(workdir / "timing.jsonl")
  text = write_report(workdir).read_text()
  total = sum(row["wall_s"] for row in rows)
  assert f"| all | {len(rows)} | {total:.1f} |" in text
  assert "| round | 20 | 50.0 |" in text
  assert "12,288 tokens/s" in text


def test_settings_are_told_by_the_names_one_can_override(write_run, tmp_path):
  text = write_report(write_run(tmp_path / "a")).read_text()
  assert "| `sync.sync_interval` | `30` |" in text
  assert "| `seed` | `0` |" in text
  assert "--config=experiments/configs/diloco.py" in text


def test_figures_that_cannot_be_written_are_one_line(write_run, tmp_path):
  workdir = write_run(tmp_path / "a")
  (workdir / "figures").write_text("in the way")
  with pytest.raises(RecordError, match="cannot write .*figures"):
    write_report(workdir)


@pytest.mark.parametrize(
  ("name", "text", "reason"),
  [
    ("run.json", "", "run.json cannot be read"),
    ("config.json", "{", "config.json cannot be read"),
    ("run.json", None, "is not a run directory: run.json is missing"),
  ],
)
def test_a_damaged_record_leaves_one_line_and_the_rest(
  write_run, tmp_path, name, text, reason
):
  workdir = write_run(tmp_path / "a")
  (workdir / name).unlink()
  if text is not None:
    (workdir / name).write_text(text)
  with pytest.raises(RecordError, match=f"is no report: .*{reason}") as raised:
    write_report(workdir)
  assert "\n" not in str(raised.value)
