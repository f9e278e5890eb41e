"""MuLoCo: Muon as inner optimizer, 2 bits a value between replicas.

Source: Therien et al., 2025, arXiv 2505.23725. Claim (recalled): Muon's
pseudo-gradients compress better than AdamW's; 2 bits with error feedback end at
the loss of full-precision AdamW DiLoCo. Differs: H = 30; outer momentum 0.6.
Cost: three minutes on two CPU cores.

    python -m experiments.train --config=experiments/configs/muloco.py \
        --workdir=runs/muloco
"""

from experiments.configs import default


def get_config():
  """Returns MuLoCo's recipe with rounds of 30 steps."""
  config = default.get_config()
  config.sync.method = "muloco"
  config.sync.sync_interval = 30
  return config
