"""AllReduce: the gradients of every step are averaged over the slow links.

Source: all the papers use it as their baseline. Claim: the other methods try
to reach its loss while they send fewer bytes. Cost: two minutes on two CPU
cores.

    python -m experiments.train --config=experiments/configs/allreduce.py \
        --workdir=runs/allreduce
"""

from experiments.configs import default


def get_config():
  """Returns the default config with gradients averaged at every step."""
  config = default.get_config()
  config.sync.method = "allreduce"
  return config
