"""A grid: all combinations of two lengths of a round and two learning rates.

Claim: none; it shows how to write a grid. Cost: 4 runs of 300 steps for every
seed, a minute each on two CPU cores.

    python -m experiments.sweep --config=experiments/configs/grid.py \
        --workdir=runs/grid --processes=2
"""

from experiments.configs import default


def get_config():
  """Returns the config of a sweep: two values of H, two learning rates."""
  config = default.sweep()
  config.base.total_steps = 300
  config.grid = {
    "sync.sync_interval": (10, 30),
    "inner.learning_rate": (1e-3, 2e-3),
  }
  config.seeds = (0,)
  return config
