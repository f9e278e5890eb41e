"""SparseLoCo: the largest pseudo-gradients of each block, in 2 bits.

Source: Sarfi et al., 2025, arXiv 2508.15706. Claim (recalled): better loss
than full-precision DiLoCo at 1 to 3 % of the values and 2 bits. Differs: H =
30; the outer learning rate is 1, without momentum, as in the paper. Cost: two
minutes on two CPU cores.

    python -m experiments.train --config=experiments/configs/sparse_loco.py \
        --workdir=runs/sparse_loco
"""

from experiments.configs import default


def get_config():
  """The default with 64 of 4096 values, 2 bits and decaying feedback."""
  config = default.get_config()
  config.sync.method = "sparse_loco"
  config.sync.sync_interval = 30
  config.outer.learning_rate = 1.0
  config.outer.momentum = 0.0
  config.codec.name = "top_k+int"
  config.codec.top_k_fraction = 1 / 64
  config.codec.top_k_block_size = 4096
  config.codec.bits = 2
  config.codec.scale = "tensor"
  config.exchange.error_feedback = True
  config.exchange.feedback_decay = 0.95
  return config
