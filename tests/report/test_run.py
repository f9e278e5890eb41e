import math

import pytest

from dilocox_jax import metrics
from dilocox_jax.metrics import read_rows
from dilocox_jax.report import load_run


def test_a_run_says_what_its_last_rows_say(write_run, tmp_path):
  run = load_run(write_run(tmp_path / "a"))
  last = read_rows(tmp_path / "a/metrics.jsonl")[-1]
  assert run.finished and last["kind"] == "final"
  assert run.validation_loss == last["outer_loss"]
  assert run.total_sent_bytes == last["total_sent_bytes"]
  assert (run.steps, run.tokens) == (last["step"], last["tokens"])
  assert len(run.rounds) == 20 and len(run.evaluations) == 10


def test_a_run_that_was_killed_counts_its_rounds(write_run, tmp_path):
  run = load_run(write_run(tmp_path / "a", finish=False))
  assert not run.finished
  assert run.steps == 600 and run.result is not None
  assert run.result.step == 540


def test_throughput_weighs_rounds_by_their_duration(write_run, tmp_path):
  workdir = write_run(tmp_path / "a", num_steps=30, finish=False)
  with metrics.Recorder(workdir, resume_step=30) as recorder:
    recorder.record_timing(
      step=60, event="round", wall_s=7.5, tokens_per_s=4096.0
    )
  run = load_run(workdir)
  # (2.5 s x 12288/s + 7.5 s x 4096/s) / 10 s; compiling trains nothing.
  assert run.tokens_per_s == pytest.approx(6144)
  assert run.wall_s == pytest.approx(21.5)


def test_a_run_before_its_first_round_is_empty(write_run, tmp_path):
  run = load_run(write_run(tmp_path / "a", num_steps=0, finish=False))
  assert (run.steps, run.tokens, run.total_sent_bytes) == (0, 0, 0)
  assert math.isnan(run.validation_loss) and math.isnan(run.tokens_per_s)


def test_a_directory_without_a_run_is_refused_by_name(tmp_path):
  with pytest.raises(ValueError, match="not a run directory: config.json"):
    load_run(tmp_path)


@pytest.mark.parametrize(
  ("name", "text", "said"),
  [
    ("run.json", "{", "run.json cannot be read"),
    ("run.json", "[" * 10**5, "run.json cannot be read"),
    ("run.json", "{}", "run.json is damaged: it has no corpus_digest"),
    ("config.json", "3", "config.json cannot be read"),
    ("timing.jsonl", '{"step": 3}\n', "timing.jsonl has a damaged row"),
    ("metrics.jsonl", '{"step": 3, "kind": "round"}\n', "metrics.jsonl has a"),
  ],
)
def test_a_broken_record_is_refused_by_name(
  write_run, tmp_path, name, text, said
):
  workdir = write_run(tmp_path / "a", num_steps=0)
  (workdir / name).write_text(text)
  with pytest.raises(ValueError, match=said) as error:
    load_run(workdir)
  assert "\n" not in str(error.value)
