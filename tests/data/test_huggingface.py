import json
import sys

import pytest

from dilocox_jax.data import shards, sources
from dilocox_jax.data.documents import sampled
from dilocox_jax.data.huggingface import read_dataset
from dilocox_jax.data.tokenizers import byte_tokenizer
from tests import runs

TEXTS = [f"Document {n} says that {n} is a number." for n in range(300)]


def test_a_missing_package_is_named_in_one_line(monkeypatch):
  monkeypatch.setitem(sys.modules, "datasets", None)
  with pytest.raises(ValueError, match=r"pip install 'dilocox_jax\[hf\]'"):
    sources.load_corpus("huggingface", glob="anything")


@pytest.fixture(scope="module", name="library")
def library_fixture():
  reason = "the extra hf is not installed: pip install 'dilocox_jax[hf]'"
  library = pytest.importorskip("datasets", reason=reason)
  library.disable_progress_bars()
  return library


@pytest.fixture(scope="module", name="folder")
def folder_fixture(library, tmp_path_factory):
  """The same texts in every form."""
  folder = tmp_path_factory.mktemp("sets")
  made = library.Dataset.from_dict({"text": TEXTS, "n": list(range(300))})
  made.save_to_disk(folder / "saved")
  other = library.Dataset.from_dict({"text": ["of the test split"]})
  splits = {"train": made, "test": other}
  library.DatasetDict(splits).save_to_disk(folder / "splits")
  for part in range(2):
    rows = made.select(range(part, 300, 2))
    rows.to_parquet(folder / f"{part}.parquet")
    lines = "\n".join(json.dumps(row) for row in rows)
    (folder / f"{part}.jsonl").write_text(lines)
  return folder


FORMS = ("saved", "splits", "*.parquet", "*.jsonl", "saved/*.arrow")


def test_every_form_gives_the_same_documents_and_corpus(folder):
  saved = set(read_dataset(f"{folder}/saved"))
  assert sorted(d.content.decode() for d in saved) == sorted(TEXTS)
  made = []
  for form in FORMS:
    found = list(read_dataset(f"{folder}/{form}"))
    assert set(found) == saved and len(found) == len(TEXTS)
    made.append(sources.load_corpus("huggingface", glob=f"{folder}/{form}"))
  assert len({corpus.digest for corpus in made}) == 1
  assert len({corpus.validation.tobytes() for corpus in made}) == 1


def test_a_split_is_named_and_a_wrong_one_is_answered_with_those_there(folder):
  (only,) = read_dataset(f"{folder}/splits", split="test")
  assert only.content == b"of the test split"
  with pytest.raises(ValueError, match="data.split='dev' must be one of train"):
    list(read_dataset(f"{folder}/splits", split="dev"))


def test_the_first_documents_or_drawn_ones_can_be_taken(folder):
  def texts(**options):
    corpus = sources.load_corpus(
      "huggingface",
      glob=f"{folder}/saved",
      max_documents=40,
      validation_fraction=0.2,
      **options,
    )
    text = corpus.train.tobytes() + b"\n" + corpus.validation.tobytes()
    return sorted(text.decode().split("\n"))

  assert texts() == sorted(TEXTS[:40])
  drawn = texts(shuffle_buffer=50, seed=1)
  assert drawn == texts(shuffle_buffer=50, seed=1) != sorted(TEXTS[:40])
  assert set(drawn) <= set(TEXTS[:100])
  assert drawn != texts(shuffle_buffer=50, seed=2)


def test_a_damaged_file_or_row_is_an_error_or_counted(library, tmp_path):
  rows = {"text": [*TEXTS, None]}
  library.Dataset.from_dict(rows).to_parquet(tmp_path / "a.parquet")
  (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
  glob = f"{tmp_path}/*.parquet"
  with pytest.raises(ValueError, match="row 300 has no text") as error:
    sources.load_corpus("huggingface", glob=glob)
  assert "\n" not in str(error.value)
  corpus = sources.load_corpus("huggingface", glob=glob, damaged="skip")
  assert corpus.num_skipped == 2 and corpus.num_files == 300
  (tmp_path / "a.parquet").unlink()
  with pytest.raises(ValueError, match="b.parquet: Parquet magic bytes"):
    sources.load_corpus("huggingface", glob=glob)


def test_without_a_network_a_name_on_the_hub_is_one_line(library, monkeypatch):
  monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
  constants = pytest.importorskip("huggingface_hub.constants")
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  with pytest.raises(ValueError, match="the hub cannot be reached") as error:
    sources.load_corpus("huggingface", glob="allenai/c4:en")
  assert "\n" not in str(error.value)
  assert "allenai/c4:en is no folder and no file here" in str(error.value)


@pytest.mark.parametrize("form", ["saved", "*.parquet"])
def test_a_stream_that_was_cut_goes_on_to_the_same_tokens(
  form, folder, tmp_path, monkeypatch
):
  monkeypatch.setattr(shards, "_BATCH", 100)

  def writing(name):
    drawn = sampled(read_dataset(f"{folder}/{form}"), 50, 250, seed=3)
    return shards.write(tmp_path / name, drawn, byte_tokenizer(), 0.1)

  assert len(list(writing("whole"))) == 3
  cut = writing("cut")
  next(cut)
  cut.close()
  assert len(list(writing("cut"))) == 2
  assert runs.files(tmp_path / "cut") == runs.files(tmp_path / "whole")
