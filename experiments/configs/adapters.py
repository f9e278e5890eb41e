"""Fine-tuning with adapters: only the adapters are trained and sent.

The size of the model follows the colon. `tiny` reads the pages of docs/.
`llama_1_1b` has the sizes of TinyLlama; name its text and tokenizer with
--config.data.glob and --config.data.tokenizer. In the example, `base` is a run
or a checkpoint that has the model to fine-tune.

Source: LoRA, arXiv 2106.09685; method, ranks and rates: this project. Claim:
two replicas of 1.1 billion parameters on one device need less than 12 GB
(estimated by `experiments.fits`; not run). Cost: a minute on two CPU cores for
`tiny`, one accelerator for `llama_1_1b`.

    python -m experiments.train --config=experiments/configs/adapters.py:tiny \
        --config.checkpoint.init_from=base --workdir=runs/adapters
"""

from experiments.configs import default, overlap_loco

_ALL = "query,key,value,output,gate,up,down"
ADAPTERS = {
  "tiny": {
    "total_steps": 160,
    "data.glob": "docs/**/*.md",
    "data.validation_fraction": 0.2,
    "lora.rank": 8,
    "inner.learning_rate": 1e-2,
    "checkpoint.interval_steps": 48,
  },
  "llama_1_1b": {
    "total_steps": 1600,
    "data.batch_size": 8,
    "data.sequence_length": 1024,
    "model.preset": "llama_1_1b",
    "model.remat": "full",
    "model.loss_chunk_tokens": 1024,
    "lora.rank": 16,
    "inner.accumulate_steps": 8,
    "inner.learning_rate": 5e-4,
  },
}


def get_config(name: str = "tiny"):
  """Returns the default run changed to train adapters.

  `name` is the size of the model, one of `ADAPTERS`.
  """
  config = default.get_config()
  config.update_from_flattened_dict(
    {
      "sync.method": "overlap_loco",
      "data.source": "text_files",
      "lora.products": _ALL,
      "inner.optimizer": "adamw",
      **overlap_loco.AVERAGE,
      **ADAPTERS[name],
    }
  )
  return config
