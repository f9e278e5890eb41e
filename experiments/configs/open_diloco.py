"""OpenDiLoCo: DiLoCo as its open reproduction sets it.

Source: arXiv 2407.07852. Claim (recalled): perplexity 13.73 with 8 replicas
against 13.68 for data parallel. Differs: H = 30 for 500. Cost: two minutes on
two CPU cores.

    python -m experiments.train --config=experiments/configs/open_diloco.py \
        --workdir=runs/open_diloco
"""

from experiments.configs import default


def get_config():
  """The default with OpenDiLoCo's outer optimizer."""
  config = default.get_config()
  config.sync.method = "open_diloco"
  config.sync.sync_interval = 30
  config.outer.learning_rate = 0.7
  config.outer.momentum = 0.9
  config.codec.name = "float16"
  return config
