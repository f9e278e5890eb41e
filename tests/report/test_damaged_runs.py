"""Run directories with damaged files: one line, or a page of what is there."""

import json
from unittest import mock

import pytest

from dilocox_jax.metrics.lines import RecordError
from dilocox_jax.report import comparison, load_run, page, side_by_side
from tests import damage


@pytest.fixture(name="run_folder")
def run_folder_fixture(write_run, tmp_path):
  clock = {"clock": "cluster 1gbit", "seconds_a_step": 10.0}
  return write_run(tmp_path / "a", num_steps=120, num_fragments=2, **clock)


def read(folder):
  """Reads a run as all reports do, without drawing."""
  run = load_run(folder)
  assert run.summary and run._repr_html_()
  with (
    mock.patch.object(page, "_FIGURES", {}),
    mock.patch.object(comparison, "_pictures", return_value=[]),
  ):
    side_by_side([run, run]).write(folder / "out")
    try:
      page.write_report(folder)
    except RecordError as error:
      raise ValueError(error) from error
  return run


@pytest.mark.parametrize("name", ["run.json", "config.json"])
def test_what_describes_a_run_may_be_damaged(run_folder, name):
  path = run_folder / name
  content = path.read_bytes()
  read(run_folder)
  values = damage.VALUES if name == "run.json" else damage.VALUES[::4]
  for what, text in damage.in_fields(json.loads(content), values):
    path.write_text(text)
    damage.outcome(f"{name}: {what}", lambda: read(run_folder))
  for what, damaged in damage.in_bytes(content):
    path.write_bytes(damaged)
    damage.outcome(f"{name}: {what}", lambda: read(run_folder))


@pytest.mark.parametrize(
  ("name", "kind"),
  [
    ("metrics.jsonl", "round"),
    ("metrics.jsonl", "evaluation"),
    ("metrics.jsonl", "final"),
    ("timing.jsonl", "timing"),
  ],
)
def test_a_row_may_be_damaged(run_folder, name, kind):
  path = run_folder / name
  lines = path.read_text().splitlines()
  rows = list(map(json.loads, lines))
  number = [row.get("kind") for row in rows].index(kind)
  for what, text in damage.in_fields(rows[number]):
    path.write_text(
      "\n".join([*lines[:number], text, *lines[number + 1 :], ""])
    )
    run = damage.outcome(f"{name}: {what}", lambda: load_run(run_folder))
    if run:
      counts = [row.step for row in run] + [row.tokens for row in run]
      assert all(type(n) is int and n >= 0 for n in counts), what
      assert not any(timing.wall_s < 0 for timing in run.timings), what
  path.write_text("\n".join([*lines, ""]))
  for what, damaged in damage.in_bytes(path.read_bytes()):
    path.write_bytes(damaged)
    damage.outcome(f"{name}: {what}", lambda: read(run_folder))


@pytest.mark.parametrize(
  "name", ["run.json", "config.json", "metrics.jsonl", "timing.jsonl"]
)
def test_a_folder_in_place_of_a_file_is_one_line(run_folder, name):
  (run_folder / name).unlink()
  (run_folder / name).mkdir()
  with pytest.raises(ValueError, match=name) as error:
    load_run(run_folder)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["step", "tokens", "total_sent_bytes"])
def test_a_count_beyond_all_runs_is_damage(run_folder, field):
  path = run_folder / "metrics.jsonl"
  row = json.loads(path.read_text().splitlines()[-1])
  with path.open("a") as file:
    file.write(json.dumps(row | {field: 10**400}) + "\n")
  with pytest.raises(ValueError, match=f"damaged row.* {field}=1000.* at most"):
    load_run(run_folder)


def test_a_path_that_the_system_refuses_is_one_line(tmp_path):
  with pytest.raises(ValueError, match="config.json cannot be read"):
    load_run(tmp_path / ("a" * 300))


def test_a_row_of_who_met_may_be_damaged(run_folder):
  usage = {"get": 3, "bytes_up": 10, "bytes_down": 20}
  row = {"step": 3, "event": 1, "members": ["a"], "left_out": {"b": "late"}}
  path = run_folder / "mailbox.jsonl"
  path.write_text(json.dumps(row | {"usage": usage}) + "\n")
  assert "| 1 | a | b: late |" in page._mailbox_members(run_folder)

  def met():
    try:
      return page._mailbox_members(run_folder)
    except RecordError as error:
      raise ValueError(error) from error

  for what, text in damage.in_fields(row | {"usage": usage}):
    path.write_text(text + "\n")
    damage.outcome(what, met)


def test_a_sample_with_any_bytes_is_shown(run_folder):
  (run_folder / "sample.txt").write_bytes(b"caf\xe9\n")
  with mock.patch.object(page, "_FIGURES", {}):
    assert "    caf\ufffd" in page.write_report(run_folder).read_text()
