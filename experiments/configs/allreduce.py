"""AllReduce: every step's gradients are averaged over the slow links.

Source: the baseline of all the papers. Claim: the loss that the others try to
reach, at the bytes that they avoid. Cost: two minutes on two CPU cores.

    python -m experiments.train --config=experiments/configs/allreduce.py \
        --workdir=runs/allreduce
"""

from experiments.configs import default


def get_config():
  """The default with gradients exchanged at every step."""
  config = default.get_config()
  config.sync.method = "allreduce"
  return config
