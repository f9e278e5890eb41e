"""Runs of three papers, at their own size; the name follows the colon.

Sources: DiLoCoX, arXiv 2506.21263 (H, ranks, steps and layers recalled, not
verified); OpenDiLoCo, arXiv 2407.07852, with the batches, steps and rates of
its repository; Streaming DiLoCo, arXiv 2501.18512, tables 2 and 5. The papers
leave some settings open. This project has chosen the batches and inner rates of
DiLoCoX and Streaming DiLoCo, and the pipeline schedule. Differs: the codec E3M0
of Streaming DiLoCo has a scale for each block. Claims: see
docs/reproduction.md. Cost: one accelerator a replica; for 107B, 16 accelerators
for each of the two replicas.

The text comes from experiments.prepare_data, with the tokenizer of the paper:
WikiText-103 for DiLoCoX, C4 for the others.

    python -m experiments.train --workdir=runs/150m \
        --config=experiments/configs/papers.py:open_diloco_150m \
        --config.data.glob=tokens
"""

from dilocox_jax.plan.model.presets import MODEL_PRESETS
from experiments.configs import default

_DILOCOX = {
  "total_steps": 4000,
  "sync.method": "dilocox",
  "sync.sync_interval": 125,
  "data.sequence_length": 2048,
}
_OPEN_DILOCO = {
  "total_steps": 88_000,
  "sync.method": "open_diloco",
  "sync.sync_interval": 500,
  "inner.learning_rate": 4e-4,
  "inner.warmup_steps": 1000,
  "data.sequence_length": 1024,
}
PAPERS = {
  "dilocox_opt_1_3b": _DILOCOX
  | {
    "model.preset": "opt_1_3b",
    "exchange.codec": "low_rank(rank=64)+int(bits=4)",
    "inner.learning_rate": 2e-4,
    "data.batch_size": 16,
    "inner.accumulate_steps": 8,
  },
  # Two clusters of 16 devices: 8 stages, each on two devices (figure 1).
  "dilocox_107b": _DILOCOX
  | {
    "model.preset": "qwen_107b",
    "exchange.codec": "low_rank(rank=2048)+int(bits=4)",
    "inner.learning_rate": 1e-4,
    "data.batch_size": 32,
    "inner.accumulate_steps": 16,
    "mesh.num_stages": 8,
    "mesh.num_data_shards": 2,
    "mesh.remat": "full",
  },
  "open_diloco_150m": _OPEN_DILOCO
  | {
    "model.preset": "llama_150m",
    "mesh.num_replicas": 8,
    "data.batch_size": 512,
    "inner.accumulate_steps": 64,
  },
  "open_diloco_1_1b": _OPEN_DILOCO
  | {
    "model.preset": "llama_1_1b",
    "mesh.num_replicas": 4,
    "data.batch_size": 2048,
    "inner.accumulate_steps": 128,
  },
}
# Tokens of all replicas together, table 2.
_TOKENS = {
  "35m": 700e6,
  "100m": 1.5e9,
  "200m": 3.5e9,
  "300m": 6e9,
  "500m": 11e9,
  "1b": 25e9,
  "4b": 83e9,
}


def _streaming(size: str, batch_size: int = 128, length: int = 1024):
  """Returns the fields of a run of Streaming DiLoCo, of a size in `_TOKENS`.

  A step of each of the two replicas has `batch_size` sequences of `length`
  tokens.
  """
  preset = f"chinchilla_{size}"
  return {
    "total_steps": int(_TOKENS[size] / (2 * batch_size * length)),
    "model.preset": preset,
    "model.z_loss": 1e-4,
    "sync.method": "streaming_diloco",
    "sync.sync_interval": 30,
    # Three layers make a fragment; embeddings and the last norm make one more.
    "sync.num_fragments": 1 + MODEL_PRESETS[preset].num_layers // 3,
    "sync.overlap_steps": 1,
    "sync.mixing_alpha": 0.5,
    "inner.learning_rate": 4e-4,
    "inner.warmup_steps": 1000,
    "inner.accumulate_steps": 16,
    "outer.learning_rate": 0.4,
    "outer.momentum": 0.9,
    "data.batch_size": batch_size,
    "data.sequence_length": length,
  }


PAPERS |= {f"streaming_{size}": _streaming(size) for size in _TOKENS}


def get_config(name="streaming_35m"):
  """Returns the config of a paper's run, one of `PAPERS`."""
  if name not in PAPERS:
    raise ValueError(f"{name!r} must be one of {', '.join(PAPERS)}")
  config = default.get_config()
  config.data.source = "shards"
  config.data.glob = "tokens"
  config.model.compute_dtype = "bfloat16"
  config.model.scan_unroll = 1
  config.mesh.layout = "mesh"
  config.update_from_flattened_dict(PAPERS[name])
  return config
