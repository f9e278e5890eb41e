"""Streaming DiLoCo: fragments in turn; tau steps hide each exchange.

Source: arXiv 2501.18512. Claim (published): the loss of DiLoCo at a fraction of
its peak bandwidth. Differs: outer momentum 0.6; E3M0 has a scale for each
block. Cost: two minutes on two CPU cores.

    python -m experiments.train \
        --config=experiments/configs/streaming_diloco.py \
        --workdir=runs/streaming_diloco
"""

from experiments.configs import default


def get_config():
  """Returns its recipe with three strided fragments and tau = 4."""
  config = default.get_config()
  config.sync.method = "streaming_diloco"
  config.sync.sync_interval = 30
  config.sync.num_fragments = 3
  config.sync.overlap_steps = 4
  config.sync.mixing_alpha = 0.5
  return config
