"""From JSON lines to a run on mapped tokens, through the binaries."""

import gzip
import json
import os
import pathlib

import pytest

from dilocox_jax.data import shards
from dilocox_jax.training import run_text
from experiments.runtime import file_lock
from tests import runs
from tests.experiments.programs import run

LIBRARY = sorted(pathlib.Path(json.__file__).parents[1].glob("*.py"))[:60]


@pytest.fixture(scope="module", name="lines")
def lines_fixture(tmp_path_factory):
  folder = tmp_path_factory.mktemp("lines")
  for number in range(2):
    texts = [path.read_text() for path in LIBRARY[number::2]]
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    path = folder / f"{number}.jsonl.gz"
    path.write_bytes(gzip.compress(lines.encode()))
  return folder


def prepare(lines, workdir, *flags):
  return run(
    "prepare_data", f"--glob={lines}/*", f"--workdir={workdir}", *flags
  )


BPE = ("--tokenizer=bpe", "--vocab_size=300", "--bpe_mb=0.2")


@pytest.fixture(scope="module", name="tokens")
def tokens_fixture(lines, tmp_path_factory):
  folder = tmp_path_factory.mktemp("tokens")
  done = prepare(lines, folder, *BPE)
  assert done.returncode == 0, done.stderr
  assert "60 documents, 0 skipped" in done.stdout
  assert f"--config.data.glob={folder}" in done.stdout
  return folder


def settings(tokens):
  return runs.settings(
    model={"vocab_size": 300}, data={"source": "shards", "glob": str(tokens)}
  )


@pytest.mark.slow
def test_a_run_on_shards_that_was_stopped_ends_with_the_same_bits(
  tokens, tmp_path
):
  config = settings(tokens)
  runs.train(config, tmp_path / "cut", until=9)
  runs.train(config, tmp_path / "cut")
  runs.train(config, tmp_path / "whole")
  found = runs.metrics_text(tmp_path / "cut")
  assert found == runs.metrics_text(tmp_path / "whole")


def test_what_cannot_be_prepared_is_one_line(lines, tmp_path):
  for flags, said in (
    (("--tokenizer=no.json",), "no such file"),
    (("--text_field=body",), "has no text in the field 'body'"),
    (("--validation_fraction=2",), "must lie above 0 and below 1"),
  ):
    done = prepare(lines, tmp_path / "a", *flags)
    assert done.returncode == 2
    assert said in done.one_line


def test_damaged_lines_are_skipped_and_counted_on_request(lines, tmp_path):
  (tmp_path / "in").mkdir()
  for path in lines.iterdir():
    text = gzip.decompress(path.read_bytes()) + b'\n{"no": 1}\n'
    # The name of one of them is no UTF-8.
    name = path.stem.replace("1", os.fsdecode(b"\xe9"))
    (tmp_path / "in" / name).write_bytes(text)
  done = prepare(tmp_path / "in", tmp_path / "out")
  assert done.returncode == 2 and "line 31 has no text" in done.stderr
  done = prepare(tmp_path / "in", tmp_path / "out", "--damaged=skip")
  assert done.returncode == 0, done.stderr
  assert "60 documents, 2 skipped" in done.stdout
  assert done.stdout.count("\nskipped: ") + 1 == 2
  assert shards.map_corpus(str(tmp_path / "out")).num_files == 60


def test_what_was_begun_goes_on_with_the_same_text_and_flags_only(tmp_path):
  path, folder = tmp_path / "a.jsonl", tmp_path / "tokens"
  lines = [json.dumps({"text": f"document {n:04}"}) for n in range(2400)]

  def prepare_here(content, *flags):
    path.write_text("\n".join(content))
    given = f"--glob={path}", f"--workdir={folder}", *flags
    return run("prepare_data", *given)

  damaged = [*lines[:2100], "{damaged", *lines[2100:]]
  assert "line 2101 is no JSON" in prepare_here(damaged).stderr
  before = runs.files(folder)
  assert "have changed" in prepare_here(lines[1:]).stderr
  for flags in (
    ["--tokenizer=bpe", "--bpe_mb=0.01", "--vocab_size=300"],
    ["--text_field=body"],
    ["--shuffle_buffer=9", "--seed=1"],
    ["--max_documents=2200"],
    ["--validation_fraction=0.1"],
    [f"--glob={path};{path}"],
  ):
    assert prepare_here(lines, *flags).returncode == 2
    assert runs.files(folder) == before
  assert prepare_here(lines).returncode == 0
  corpus = shards.map_corpus(str(folder))
  text = bytes(corpus.train) + bytes(corpus.validation)
  assert corpus.num_files == 2400
  assert all(text.count(b"document %04d" % n) == 1 for n in range(2400))


def test_a_data_set_is_written_in_the_order_of_the_seed(tmp_path):
  library = pytest.importorskip("datasets", reason="the extra hf is missing")
  texts = {"body": [f"document {n}" for n in range(300)]}
  library.Dataset.from_dict(texts).to_parquet(tmp_path / "a.parquet")
  flags = ("--source=huggingface", "--text_field=body", "--shuffle_buffer=50")
  for name in ("one", "two"):
    done = prepare(tmp_path, tmp_path / name, *flags, "--max_documents=200")
    assert done.returncode == 0, done.stderr
    assert "200 documents, 0 skipped" in done.stdout
  one, two = (runs.files(tmp_path / name) for name in ("one", "two"))
  assert one == two
  text = one["train.bin"].decode().split()[1::2]
  assert len(text) > 150 and text != sorted(text, key=int)


def test_parts_are_kept_and_replicas_may_read_one_each(tmp_path):
  for name in "ab":
    (tmp_path / name).mkdir()
    for number in range(60):
      (tmp_path / name / f"{number}.txt").write_text(f"{name * 80}{number}")
  glob, workdir = f"{tmp_path}/a/*;{tmp_path}/b/*", f"{tmp_path}/tokens"
  done = run("prepare_data", f"--glob={glob}", f"--workdir={workdir}")
  assert done.returncode == 0, done.stderr
  corpus = shards.map_corpus(f"{tmp_path}/tokens")
  assert len(corpus.parts) == 2 and sum(corpus.parts) == len(corpus.train)
  data = {"source": "shards", "glob": f"{tmp_path}/tokens", "mix": "own"}
  taken = run_text.streams(runs.settings(data=data), corpus).take(20)
  for batches, own, other in zip(taken, b"ab", b"ba", strict=True):
    assert (batches == own).any() and not (batches == other).any()


def test_a_folder_is_written_by_one_process_at_a_time(lines, tmp_path):
  with file_lock.held(tmp_path / ".prepare.lock", ""):
    done = prepare(lines, tmp_path)
  assert done.returncode == 75 and "another prepare_data" in done.one_line
