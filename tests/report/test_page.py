"""What a run's page says in words beside its tables."""

import json
import math

import pytest

from dilocox_jax.metrics.lines import JsonLines
from dilocox_jax.report import load_run, side_by_side, write_report
from dilocox_jax.report.run import LoadedRun


def event(number, members, left_out, **usage):
  return {
    "step": number,
    "event": number,
    "members": members,
    "left_out": left_out,
    "usage": usage,
  }


def test_the_page_of_replicas_that_meet_says_what_went_which_way(
  write_run, tmp_path
):
  write_run(tmp_path, num_steps=30)
  rows = JsonLines(tmp_path / "mailbox.jsonl")
  usage = {"put": 1_200, "get": 7, "bytes_up": 2_000_000, "bytes_down": 3_000}
  rows.append(event(1, ["ann", "bob"], {}, **usage))
  rows.append(event(2, ["ann", "bob"], {}, **usage))
  rows.append(event(3, ["ann"], {"bob": "late"}, **usage))
  text = write_report(tmp_path).read_text()
  assert "this replica made 7 get, 1,200 put requests" in text
  assert "wrote 2.00 MB and read 3.00 kB (measured" in text
  assert "| 1 to 2 | ann, bob |  |" in text
  assert "| 3 | ann | bob: late |" in text


def test_a_link_carries_more_than_the_plan_by_what_was_counted(
  write_run, tmp_path
):
  run = load_run(write_run(tmp_path, num_steps=60, finish=False))
  path = tmp_path / "timing.jsonl"
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  rounds = [row for row in rows if row["event"] == "round"]
  for row, waited_s in zip(rounds, (0.5, 0.1), strict=True):
    row["exposed_s"] = waited_s
  for row in rows:
    row["link_bytes"] = 3 * run.total_sent_bytes / len(rows)
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  text = write_report(tmp_path).read_text()
  # Two rounds of one all-reduce: twice 3.48 MB, and three times as many.
  assert "counted 20.9 MB on the link" in text
  assert "3.000 times what the plan says" in text
  assert (
    "a round waited 0.300 s for its exchange (median, measured), and 0.500 s at"
    in text
  )


def test_a_run_in_a_notebook_and_on_one_line_is_the_same(write_run, tmp_path):
  run = load_run(write_run(tmp_path / "a<b", num_steps=60))
  loss = f"{run.evaluations[-1].outer_loss:.4f}"
  line = f"diloco, 60 steps, loss {loss}, 10.5 MB sent, {tmp_path / 'a<b'}"
  assert run.summary == line and repr(run) == f"LoadedRun({line})"
  table = run._repr_html_()
  assert "<td>10.5 MB</td>" in table and "a&lt;b" in table
  # Rows are in the order of their steps, rounds before evaluations.
  assert [row.step for row in run] == [30, 60, 60]


@pytest.mark.parametrize(
  ("loss", "bits", "perplexity"),
  [(2.0, 2 / math.log(2) / 4, math.exp(2)), (701.0, None, math.inf)],
)
def test_bits_a_byte_and_perplexity_are_those_of_the_last_loss(
  write_run, tmp_path, loss, bits, perplexity
):
  # After 6,000 steps the loss of this run is its floor.
  run = load_run(
    write_run(tmp_path, num_steps=6000, floor=loss, bytes_per_token=4.0)
  )
  assert run.perplexity == pytest.approx(perplexity)
  if bits:
    assert run.bits_per_byte == pytest.approx(bits)


def test_without_bytes_of_the_text_there_are_no_bits_a_byte(run):
  without = LoadedRun(
    run.workdir,
    run.config,
    run.record | {"bytes_per_token": None},
    run.rounds,
    run.evaluations,
    run.finished,
    run.timings,
  )
  assert math.isnan(without.bits_per_byte)


def test_fp32_gradients_of_every_step_are_what_a_replica_would_have_sent(run):
  # Two replicas: a ring sends each value once. 871,168 values of four bytes.
  assert run.fp32_bytes == 600 * 4 * 871_168


def test_the_page_shows_changed_settings_before_all_settings(
  write_run, tmp_path
):
  text = write_report(write_run(tmp_path, num_steps=60)).read_text()
  changed = text.index("## What differs from the defaults")
  everything = text.index("## All settings")
  codec = "`low_rank(rank=16)+int`"
  assert text.index("## Results") < changed < text.index("## Figures")
  assert f"| `exchange.codec` | {codec} | `float32` |" in text[:everything]
  assert f"| `exchange.codec` | {codec} |" in text[everything:]
  assert "| `sync.num_fragments` | `1` | automatic |" in text
  assert "| `seed` |" not in text[changed:everything]
  assert "| `seed` | `0` |" in text[everything:]


def test_the_title_of_a_table_has_no_digest(write_run, tmp_path):
  clock = {"clock": "cluster 1gbit", "clock_digest": "9f194cf159b9"}
  runs = []
  for name in ("a", "b"):
    write_run(tmp_path / name, seconds_a_step=0.5, **clock)
    runs.append(load_run(tmp_path / name))
  page = side_by_side(runs)
  titles = [title for title, *_ in page.sections()]
  assert titles == ["At equal tokens", "Time on the clock 'cluster 1gbit'"]
  page.write(tmp_path / "page")
  assert (tmp_path / "page/figures/hours_cluster_1gbit.png").exists()


def test_clocks_of_one_name_with_other_digests_are_not_compared(
  write_run, tmp_path
):
  runs = []
  for name in ("a", "b"):
    clock = {"clock": "cluster 1gbit", "clock_digest": name}
    write_run(tmp_path / name, seconds_a_step=0.5, **clock)
    runs.append(load_run(tmp_path / name))
  assert not side_by_side(runs).frame.clocks
