"""What a replica in another framework needs works where JAX is missing."""

import json
import os
import pathlib
import subprocess
import sys

from dilocox_jax.config import from_mapping
from dilocox_jax.data import shards, tokenizers
from dilocox_jax.data.documents import Document

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = ROOT / "tests/mailbox/without_jax.py"


def test_replicas_meet_where_jax_is_not_installed(tmp_path):
  documents = [
    Document(f"{number}.txt", b"a text of some words " * (9 + number))
    for number in range(8)
  ]
  for _ in shards.write(
    tmp_path / "tokens", documents, tokenizers.byte_tokenizer(), 0.5
  ):
    pass
  config = from_mapping(
    {
      "sync": {"method": "diloco"},
      "exchange": {
        "codec": "int(bits=1)",
        "collective": "mailbox",
        "max_norm_ratio": 100.0,
      },
      "mailbox": {"full_weight_ratio": 100.0},
      "mesh": {"num_replicas": 2},
    }
  )
  (tmp_path / "config.json").write_text(json.dumps(config.to_mapping()))
  result = subprocess.run(
    [sys.executable, str(PROGRAM), str(tmp_path)],
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout == "two replicas met without JAX\n"
