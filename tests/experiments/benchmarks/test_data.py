import json

import numpy as np

from dilocox_jax.config import RunConfig
from dilocox_jax.config.sections import DataConfig, ModelConfig
from dilocox_jax.data.corpus import Corpus
from experiments.benchmarks import data


def test_streams_are_measured_from_memory_and_from_the_same_shards(
  tmp_path, monkeypatch, capsys
):
  drawn = np.random.default_rng(0).integers(0, 256, 200_000)
  text = Corpus("stdlib", drawn.astype(np.uint8), drawn[:9], "digest", 256, 1)
  monkeypatch.setattr(data.sources, "load_corpus", lambda source: text)
  config = RunConfig(
    data=DataConfig(batch_size=2, sequence_length=8),
    model=ModelConfig(preset="nano", scan_unroll=1),
  )
  found = data.run_data(config, tmp_path, 3)
  saved = json.loads((tmp_path / "bench_data.json").read_text())
  assert saved["rates"] == found
  medians = {name: row["median"] for name, row in found.items()}
  times = medians.pop("streams from shards, times the model")
  assert times == medians["streams from shards"] / saved["model_tokens_per_s"]
  # Two replicas read 2 x 8 tokens a step; no machine needs 1 s for a step.
  assert all(rate > 32 for rate in medians.values())
  assert found["streams from shards"]["bound"] == 2e6
  assert "streams from shards" in capsys.readouterr().out


def test_shards_hold_the_tokens_of_the_text(tmp_path):
  tokens = np.arange(200 * 300, dtype=np.int32).astype(np.uint8)
  text = Corpus("stdlib", tokens, tokens[:9], "digest", 256, 1)
  mapped = data._shards_of(text, tmp_path)
  # Pieces have 300 tokens and an end each; equal pieces share a split.
  assert len(mapped.train) + len(mapped.validation) == 200 * 301
  assert isinstance(mapped.train, np.memmap)
