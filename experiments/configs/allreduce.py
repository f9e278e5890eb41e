"""AllReduce: every step's gradients are averaged over the slow links.

Source: the baseline of all the papers. Claim: it has the loss that the others
try to reach, and sends the bytes that they avoid. Cost: two minutes on two CPU
cores.

    python -m experiments.train --config=experiments/configs/allreduce.py \
        --workdir=runs/allreduce
"""

from experiments.configs import default


def get_config():
  """Returns the default with gradients averaged at every step."""
  config = default.get_config()
  config.sync.method = "allreduce"
  return config
