"""Runs on text whose entropy is known, and on text larger than memory."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from dilocox_jax.data import shards, tokenizers
from dilocox_jax.data.documents import Document
from tests import runs
from tests.data.test_corpus import ENTROPY_NATS

pytestmark = pytest.mark.slow

GB = 10**9


def train(workdir, *flags):
  """Trains, and returns processor seconds and the most bytes that it held."""
  with open(workdir.with_suffix(".log"), "w") as log:
    process = subprocess.Popen(
      [sys.executable, "-m", "experiments.train", f"--workdir={workdir}"]
      + [f"--config.{flag}" for flag in flags],
      stdout=log,
      stderr=log,
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
  assert process.returncode == 0, log.name
  # Linux counts memory in units of 1,024 bytes.
  return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def test_the_entropy_of_the_chain_is_reached_in_two_minutes(tmp_path):
  seconds, _ = train(
    tmp_path / "run",
    "data.source=synthetic",
    "model.preset=nano",
    "model.vocab_size=64",
    "total_steps=2500",
    "sync.method=allreduce",
    "inner.learning_rate=0.005",
  )
  (final,) = runs.rows(tmp_path / "run", "final")
  gap = final["outer_loss"] / ENTROPY_NATS - 1
  print(f"{100 * gap:+.2f} % from the entropy, {seconds:.1f} processor seconds")
  assert -0.005 < gap < 0.01
  # A machine with nothing else to do takes no longer than its processors do.
  assert seconds < 120


def shards_of(folder, num_bytes):
  """Tokens on disk: a few documents, whose text is then made longer."""
  text = (pathlib.Path(json.__file__).parent / "decoder.py").read_bytes()
  documents = [Document(f"{n}", b"%d " % n + text) for n in range(100)]
  for _ in shards.write(folder, documents, tokenizers.byte_tokenizer(), 0.1):
    pass
  block = (folder / "train.bin").read_bytes()
  with open(folder / "train.bin", "ab") as file:
    while file.tell() < num_bytes:
      file.write(block[: num_bytes - file.tell()])
  index = json.loads((folder / "index.json").read_text())
  index["tokens"]["train"] = max(num_bytes, len(block))
  index["parts"] = [index["tokens"]["train"]]
  (folder / "index.json").write_text(json.dumps(index))
  return folder


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux")
def test_text_of_4_gb_takes_little_more_memory_than_4_mb(tmp_path):
  held = {}
  for num_bytes in (4 * GB, 4 * GB // 1000):
    folder = shards_of(tmp_path / f"tokens{num_bytes}", num_bytes)
    assert (folder / "train.bin").stat().st_size == num_bytes
    _, held[num_bytes] = train(
      tmp_path / f"run{num_bytes}",
      "data.source=shards",
      f"data.glob={folder}",
      "model.preset=nano",
      "total_steps=600",
    )
    (folder / "train.bin").unlink()
  print({size: f"{most / 2**20:.0f} MiB" for size, most in held.items()})
  assert held[4 * GB] - held[4 * GB // 1000] < 1.5 * GB
