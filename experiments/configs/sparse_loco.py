"""SparseLoCo: the largest values of a pseudo-gradient's blocks, in 2 bits.

Source: Sarfi et al., 2025, arXiv 2508.15706. Claim (recalled): better loss
than full-precision DiLoCo at 1 to 3 % of the values and 2 bits. Differs: H =
30; the outer learning rate is 1, without momentum, as in the paper. Cost: two
minutes on two CPU cores.

    python -m experiments.train --config=experiments/configs/sparse_loco.py \
        --workdir=runs/sparse_loco
"""

from experiments.configs import default


def get_config():
  """Returns SparseLoCo's recipe with rounds of 30 steps."""
  config = default.get_config()
  config.sync.method = "sparse_loco"
  config.sync.sync_interval = 30
  return config
