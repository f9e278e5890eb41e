"""A run that is killed, and started again, ends with the same bits.

Moments are recognised by what the run has written, never by a clock, and each
test asserts that the process still lived when it was killed.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from dilocox_jax.metrics import read_rows
from tests import runs

CONFIGS = pathlib.Path(__file__).parents[2] / "experiments" / "configs"
METHODS = ("diloco", "streaming_diloco", "dilocox")
SETTINGS = {
  "total_steps": 400,
  "data.source": "synthetic",
  "data.batch_size": 2,
  "data.sequence_length": 16,
  "model.preset": "nano",
  "model.scan_unroll": 1,
  "inner.warmup_steps": 5,
  "evaluation.interval_steps": 40,
  "evaluation.num_sequences": 8,
  "checkpoint.interval_steps": 40,
  "sync.sync_interval": 10,
}
EXTRA = {"streaming_diloco": {"sync.num_fragments": 2}}
DEADLINE_S = 300


def command(method, workdir, data=None):
  settings = SETTINGS | EXTRA.get(method, {}) | (data or {})
  return [
    *(sys.executable, "-m", "experiments.train"),
    f"--config={CONFIGS / method}.py",
    f"--workdir={workdir}",
    *(f"--config.{name}={value}" for name, value in settings.items()),
  ]


def train(method, workdir, data=None):
  done = subprocess.run(
    command(method, workdir, data), capture_output=True, text=True, check=False
  )
  assert done.returncode == 0, done.stderr
  return workdir


def has_rows(workdir, kind, count):
  return sum(row["kind"] == kind for row in written(workdir)) >= count


def written(workdir):
  path = workdir / "metrics.jsonl"
  return read_rows(path) if path.exists() else []


def partial_saves(workdir):
  return list((workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def is_saving(workdir):
  return has_rows(workdir, "round", 8) and bool(partial_saves(workdir))


MOMENTS = {
  "before_the_first_save": lambda w: has_rows(w, "round", 1),
  "during_a_round": lambda w: has_rows(w, "round", 14),
  "between_rounds": lambda w: has_rows(w, "evaluation", 4),
  "during_a_save": is_saving,
  "during_the_last_save": lambda w: has_rows(w, "final", 1),
}
FAST = {("diloco", "during_a_save")}
CASES = [
  pytest.param(
    method,
    moment,
    marks=[] if (method, moment) in FAST else [pytest.mark.slow],
  )
  for method in METHODS
  for moment in MOMENTS
]


def kill_at(method, workdir, is_moment, data=None):
  """Starts a run and kills it as soon as a moment has come."""
  process = subprocess.Popen(
    command(method, workdir, data),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  give_up = time.monotonic() + DEADLINE_S
  try:
    while not is_moment(workdir):
      assert process.poll() is None, "the run ended before the moment came"
      assert time.monotonic() < give_up, "the moment never came"
      time.sleep(0.0005)
  finally:
    os.kill(process.pid, signal.SIGKILL)
    code = process.wait()
  assert code == -signal.SIGKILL, "the run had ended when it was killed"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
  """The run that nobody killed, by method."""
  made = {}

  def get(method):
    if method not in made:
      workdir = tmp_path_factory.mktemp("whole") / method
      made[method] = train(method, workdir)
    return made[method]

  return get


def assert_same_run(workdir, other):
  assert runs.metrics_text(workdir) == runs.metrics_text(other)
  state, record = runs.saved(workdir)
  expected, expected_record = runs.saved(other)
  assert record == expected_record and record["position"]["is_finished"]
  runs.assert_same_bits(state, expected)
  assert not partial_saves(workdir), "what the kill left was not swept"


@pytest.mark.parametrize("method, moment", CASES)
def test_a_killed_run_continues_to_the_same_bits(
  method, moment, uninterrupted, tmp_path
):
  kill_at(method, tmp_path, MOMENTS[moment])
  assert not has_rows(tmp_path, "round", 40) or moment.endswith("last_save")
  train(method, tmp_path)
  assert_same_run(tmp_path, uninterrupted(method))


@pytest.mark.slow
def test_a_run_killed_twice_continues_to_the_same_bits(uninterrupted, tmp_path):
  kill_at("dilocox", tmp_path, lambda w: has_rows(w, "round", 9))
  kill_at("dilocox", tmp_path, lambda w: has_rows(w, "round", 24))
  train("dilocox", tmp_path)
  assert_same_run(tmp_path, uninterrupted("dilocox"))


LIBRARY = pathlib.Path(json.__file__).parents[1]


def json_lines(folder):
  """JSON lines, with a vocabulary that is trained on them."""
  texts = [path.read_text() for path in sorted(LIBRARY.glob("*.py"))[:40]]
  lines = "\n".join(json.dumps({"body": text}) for text in texts)
  (folder / "texts.jsonl").write_text(lines)
  return {
    "data.source": "text_files",
    "data.glob": folder / "texts.jsonl",
    "data.text_field": "body",
    "data.tokenizer": "bpe",
    "data.vocab_size": 300,
    "model.vocab_size": 300,
    "data.num_workers": 2,
  }


def saved_data_set(folder):
  """A data set of Hugging Face on disk, read through a shuffle buffer."""
  library = pytest.importorskip("datasets", reason="the extra hf is missing")
  texts = [path.read_text() for path in sorted(LIBRARY.glob("*.py"))[:40]]
  library.Dataset.from_dict({"text": texts}).save_to_disk(folder / "saved")
  return {
    "data.source": "huggingface",
    "data.glob": folder / "saved",
    "data.shuffle_buffer": 8,
    "data.max_documents": 30,
    "data.num_workers": 2,
  }


@pytest.mark.slow
@pytest.mark.parametrize("text_of", [json_lines, saved_data_set])
def test_a_killed_run_on_other_texts_continues_to_the_same_bits(
  text_of, tmp_path, monkeypatch
):
  monkeypatch.setenv("DILOCOX_JAX_CACHE", str(tmp_path / "cache"))
  data = text_of(tmp_path)
  train("dilocox", tmp_path / "whole", data)
  kill_at("dilocox", tmp_path / "cut", MOMENTS["during_a_round"], data)
  train("dilocox", tmp_path / "cut", data)
  assert_same_run(tmp_path / "cut", tmp_path / "whole")
