"""AllReduce and `overlap_loco` on models of three sizes, at one setting.

Every model sees 20 tokens a parameter with the same inner rate and the same
rounds, so that its gap says how the loss of hidden, compressed rounds changes
with the size. The largest model is `tiny`, whose runs are in `ablate_long`.
This config claims nothing: docs/log.md says what was found. Cost: one to six
minutes a run on a core.

    python -m experiments.ablate --config=experiments/configs/ablate_sizes.py \
        --workdir=runs/ablate_sizes --processes=2
"""

from experiments.configs import ablate_long
from experiments.configs.overlap_loco import AVERAGE

# Parameters, and the fields of the model and the run that make them.
SIZES = {
  "98 thousand": {
    "model.model_dim": 40,
    "model.ff_dim": 108,
    "total_steps": 1920,
  },
  "286 thousand": {
    "model.model_dim": 72,
    "model.ff_dim": 192,
    "total_steps": 5584,
  },
}
METHODS = {
  "allreduce": {"sync.method": "allreduce"},
  "overlap_loco": {"sync.method": "overlap_loco"},
  "overlap_loco, average": {"sync.method": "overlap_loco", **AVERAGE},
}


def get_config():
  """Returns every method on every size but the largest."""
  config = ablate_long.get_config()
  with config.unlocked():
    config.base.evaluation.interval_steps = 0
    config.base.inner.learning_rate = 0.004
    config.runs = [
      {"name": f"{method}, {size}", **fields, **shape}
      for method, fields in METHODS.items()
      for size, shape in SIZES.items()
    ]
  return config
