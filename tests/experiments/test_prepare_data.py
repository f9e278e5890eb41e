"""From JSON lines to a run on mapped tokens, through the binaries."""

import gzip
import json
import os
import pathlib
import shlex

import pytest

from dilocox_jax.data import shards
from dilocox_jax.metrics import work_directory
from dilocox_jax.training import run_text
from tests import runs
from tests.experiments.programs import run

LIBRARY = sorted(pathlib.Path(json.__file__).parents[1].glob("*.py"))[:60]


@pytest.fixture(scope="module", name="lines")
def lines_fixture(tmp_path_factory):
  folder = tmp_path_factory.mktemp("lines")
  # The name of one of them is no UTF-8.
  for number, name in enumerate(("0", os.fsdecode(b"\xe9"))):
    texts = [path.read_text() for path in LIBRARY[number::2]]
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    path = folder / f"{name}.jsonl.gz"
    path.write_bytes(gzip.compress(lines.encode()))
  return folder


def prepare(lines, workdir, *flags):
  return run(
    "prepare_data", f"--glob={lines}/*", f"--workdir={workdir}", *flags
  )


@pytest.mark.slow
def test_a_run_on_shards_that_was_stopped_ends_with_the_same_bits(
  lines, tmp_path
):
  bpe = ("--tokenizer=bpe", "--vocab_size=300", "--bpe_mb=0.2")
  folder = tmp_path / "tokens"
  done = prepare(lines, folder, *bpe)
  assert done.returncode == 0, done.stderr
  assert "60 documents: " in done.stdout
  assert f"--config.data.glob={folder}" in done.stdout
  config = runs.settings(
    model={"vocab_size": 300}, data={"source": "shards", "glob": str(folder)}
  )
  runs.train(config, tmp_path / "cut", until=9)
  runs.train(config, tmp_path / "cut")
  runs.train(config, tmp_path / "whole")
  found = runs.metrics_text(tmp_path / "cut")
  assert found == runs.metrics_text(tmp_path / "whole")


def test_the_flags_to_train_can_be_copied_if_a_path_has_spaces(lines, tmp_path):
  folder = tmp_path / "my tokens"
  done = prepare(lines, folder)
  assert done.returncode == 0, done.stderr
  assert f"--config.data.glob={folder}" in shlex.split(done.stdout)


def test_what_cannot_be_prepared_is_one_line(lines, tmp_path):
  for flags, said in (
    (("--tokenizer=no.json",), "no such file"),
    (("--text_field=body",), "has no text in the field 'body'"),
    (("--validation_fraction=2",), "in the range [0.0, 1.0]"),
  ):
    done = prepare(lines, tmp_path / "a", *flags)
    assert done.returncode == 2
    assert said in done.one_line


def test_parts_are_kept_and_replicas_may_read_one_each(tmp_path):
  for name in "ab":
    (tmp_path / name).mkdir()
    for number in range(60):
      (tmp_path / name / f"{number}.txt").write_text(f"{name * 80}{number}")
  done = run(
    "prepare_data",
    f"--glob={tmp_path}/a/*;{tmp_path}/b/*",
    f"--workdir={tmp_path}/tokens",
  )
  assert done.returncode == 0, done.stderr
  corpus = shards.map_corpus(f"{tmp_path}/tokens")
  assert len(corpus.parts) == 2 and sum(corpus.parts) == len(corpus.train)
  data = {"source": "shards", "glob": f"{tmp_path}/tokens", "mix": "own"}
  taken = run_text.streams(runs.settings(data=data), corpus).take(20)
  for batches, own, other in zip(taken, b"ab", b"ba", strict=True):
    assert (batches == own).any() and not (batches == other).any()


def test_a_folder_is_written_by_one_process_at_a_time(lines, tmp_path):
  with work_directory.locked(tmp_path / ".prepare.lock", ""):
    done = prepare(lines, tmp_path)
  assert done.returncode == 75 and "another prepare_data" in done.one_line
