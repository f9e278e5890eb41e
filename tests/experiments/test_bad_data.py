"""Data, tokenizers and weights that do not fit, through the command line."""

import json
import subprocess
import sys

import numpy as np
import pytest

from dilocox_jax.data import shards, tokenizers
from dilocox_jax.data.documents import Document
from dilocox_jax.models import weights
from dilocox_jax.plan.model.shapes import ModelShape
from tests import runs
from tests.experiments.test_bad_input import assert_one_line, train

pytestmark = pytest.mark.slow  # Every line has a fast test where it is made.


def no_tokenizer_file(folder):
  flags = [f"--config.data.tokenizer={folder}/tokenizer.json"]
  return flags, "tokenizer.json: no such file"


def vocabulary_larger_than_the_models(folder):
  flags = ["--config.data.tokenizer=bpe", "--config.data.source=stdlib"]
  return flags, "the text has 1024 different tokens, but the model nano has"


def corpus_shorter_than_a_batch(folder):
  for number in range(40):
    (folder / f"{number}.txt").write_text(f"text {number}")
  flags = ["--config.data.source=text_files", "--config.data.batch_size=900"]
  return [*flags, f"--config.data.glob={folder}/*.txt"], "use more text"


def no_network(folder):
  pytest.importorskip("datasets", reason="the extra hf is not installed")
  flags = ["--config.data.source=huggingface"]
  said = "the hub cannot be reached"
  return [*flags, "--config.data.glob=allenai/c4:en"], said


def another_family(folder):
  (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
  said = "family 'gpt2' cannot be read: have opt, llama, qwen2"
  return [f"--config.checkpoint.init_from={folder}"], said


def tensors_of_another_family(folder):
  shape = ModelShape(1, 8, 2, 8, 256)
  tensors = {"model.embed_tokens.weight": np.zeros((256, 8), np.float32)}
  pytest.importorskip("safetensors.numpy").save_file(
    tensors, folder / weights.TENSORS_FILE
  )
  config = weights.config_of(shape, "qwen2")
  (folder / "config.json").write_text(json.dumps(config))
  flags = [f"--config.checkpoint.init_from={folder}"]
  return flags, "the checkpoint is no qwen2: it lacks model.layers.0"


def truncated_shard(folder):
  documents = [Document(f"{n}", b"text %d" % n * 40) for n in range(60)]
  for _ in shards.write(folder, documents, tokenizers.byte_tokenizer(), 0.1):
    pass
  with open(folder / "train.bin", "r+b") as file:
    file.truncate(1000)
  flags = ["--config.data.source=shards", f"--config.data.glob={folder}"]
  return flags, "train.bin has 1,000 bytes instead of"


@pytest.mark.parametrize(
  "case",
  [
    no_tokenizer_file,
    vocabulary_larger_than_the_models,
    corpus_shorter_than_a_batch,
    no_network,
    another_family,
    tensors_of_another_family,
    truncated_shard,
  ],
)
def test_what_does_not_fit_is_one_line(case, tmp_path):
  (tmp_path / "in").mkdir()
  flags, hint = case(tmp_path / "in")
  workdir = f"--workdir={tmp_path / 'run'}"
  if case is no_tokenizer_file:
    flags.append("--config.data.source=stdlib")
  done = train(*runs.SMALL_FLAGS, workdir, *flags)
  assert_one_line(done, 2)
  assert hint in done.stderr


def test_a_package_that_is_missing_is_one_line(tmp_path):
  hides = "import sys; sys.modules['datasets'] = None; import runpy"
  run = "runpy.run_module('experiments.train', run_name='__main__')"
  done = subprocess.run(
    [
      *(sys.executable, "-c", f"{hides}; {run}", f"--workdir={tmp_path}"),
      *("--config.data.source=huggingface", "--config.data.glob=allenai/c4"),
    ],
    capture_output=True,
    text=True,
    check=False,
  )
  assert_one_line(done, 2)
  assert "pip install 'dilocox_jax[hf]'" in done.stderr
